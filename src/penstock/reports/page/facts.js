// Sentences, numbers side by side, and lines to copy.
import { h } from "./dom.js";
import { shown } from "./units.js";

export const text = ({ text: said, note }) => h("p", { class: note ? "note" : null, dir: "auto" }, note ? `! ${said}` : said);

export const facts = ({ facts: all }) =>
  h("dl", { class: "facts" }, all.map(({ label, value, unit, note }) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, shown(value, unit)), note ? h("dd", { class: "small" }, note) : null)));

export function command({ text: line }) {
  const button = h("button", { type: "button", click: async () => {
    try {
      await navigator.clipboard.writeText(line);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code); // from disk some browsers allow no clipboard: the line is marked instead
      button.textContent = "marked";
    }
  } }, "copy");
  const code = h("code", {}, line);
  return h("p", { class: "command" }, code, button);
}
