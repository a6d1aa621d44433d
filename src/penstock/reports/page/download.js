// Files that a person saves from the page.
import { h } from "./dom.js";

/** Hands a file to the browser. */
export function save(name, content, type) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** A name of a file from a title. */
export const slug = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "table";

const cell = (value) => {
  let text = value === null || value === undefined ? "" : String(value);
  if (typeof value === "string" && /^\s*[=+\-@]/.test(text)) text = `'${text}`; // a spreadsheet would take it for a formula
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/** A table as CSV. */
export const csv = (columns, rows) => [columns, ...rows].map((row) => row.map(cell).join(",") + "\r\n").join("");

/** A button that saves a table. */
export const csvButton = (title, columns, rows) =>
  h("button", { type: "button", click: () => save(`${slug(title)}.csv`, csv(columns, rows()), "text/csv") }, "CSV");

const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "text-anchor", "font-size", "font-family", "font-weight"];

/** An SVG element as a file of its own, which looks as it does here and now: the page's styles do not go with it. */
function alone(svg) {
  const copy = svg.cloneNode(true), parts = copy.querySelectorAll("*");
  svg.querySelectorAll("*").forEach((part, at) => {
    const look = getComputedStyle(part);
    for (const name of LOOKS) parts[at].setAttribute(name, look.getPropertyValue(name).replaceAll('"', "'"));
    parts[at].removeAttribute("class");
  });
  return new XMLSerializer().serializeToString(copy);
}

/** A button that saves an SVG element. */
export const svgButton = (title, svg) =>
  h("button", { type: "button", click: () => save(`${slug(title)}.svg`, alone(svg), "image/svg+xml") }, "SVG");

/** A button that saves a canvas. */
export const pngButton = (title, canvas) =>
  h("button", { type: "button", click: () => canvas.toBlob((blob) => save(`${slug(title)}.png`, blob)) }, "PNG");
