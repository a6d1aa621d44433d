// A table that sorts by a click on a column; rows that belong to a plan or run open it.
import { h, figure } from "./dom.js";
import { csvButton } from "./download.js";
import { shown } from "./units.js";

const MOST_ROWS = 500;

const order = (a, b) => {
  const numbers = typeof a === "number" && typeof b === "number";
  if (numbers) return a - b;
  if (a === null || b === null) return (a === null) - (b === null);
  return typeof a === "number" ? -1 : typeof b === "number" ? 1 : String(a).localeCompare(String(b));
};

export function table({ title, columns, units, rows, opens = [] }, open) {
  let sorted = rows.map((row, at) => ({ row, open: opens[at] ?? null }));
  const body = h("tbody"), heads = columns.map((name, at) => h("th", { scope: "col", "aria-sort": "none" },
    h("button", { type: "button", click: () => sort(at) }, name)));
  const more = h("p", { class: "note", hidden: rows.length <= MOST_ROWS }, `${MOST_ROWS} of ${rows.length} rows; the CSV has all`);
  function sort(at) {
    const down = heads[at].getAttribute("aria-sort") === "ascending";
    heads.forEach((head) => head.setAttribute("aria-sort", "none"));
    heads[at].setAttribute("aria-sort", down ? "descending" : "ascending");
    sorted = [...sorted].sort((a, b) => (down ? -1 : 1) * order(a.row[at], b.row[at]));
    fill();
  }
  function fill() {
    body.replaceChildren(...sorted.slice(0, MOST_ROWS).map(({ row, open: number }) => h("tr", {},
      row.map((value, at) => {
        const text = shown(value, units[at]);
        const content = at === 0 && number !== null ? h("button", { type: "button", class: "link", click: () => open(number) }, text) : text;
        return h("td", { class: units[at] === "text" ? null : "number" }, content);
      }))));
  }
  fill();
  const content = h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": title },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
  return figure(title, h("div", {}, content, more), csvButton(title, columns, () => sorted.map(({ row }) => row)));
}
