// Elements. Text only ever enters through textContent, so that a name can be anything and still is a name.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (functions) and children (elements or text). */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat())
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return element;
}

/** A block with a heading and the buttons that save it. */
export function figure(title, content, ...buttons) {
  return h("figure", {}, h("figcaption", {}, h("span", {}, title), h("span", { class: "buttons" }, ...buttons)), content);
}
