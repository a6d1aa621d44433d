// Stacked bars: parts of a whole for each row, against a limit where there is one.
import { h, s, figure } from "./dom.js";
import { STAGES } from "./colours.js";
import { csvButton, svgButton } from "./download.js";
import { table } from "./table.js";
import { plural, shown } from "./units.js";

const ROW = 22, LABEL = 110, WIDTH = 900, MOST_CUTS = 64;

export function stack(block, open) {
  const { title, rows, parts, unit, values, limits = [], cuts = [] } = block;
  const sums = values.map((row) => row.reduce((sum, value) => sum + (Number.isFinite(value) ? value : 0), 0));
  const peak = Math.max(...sums, 1e-30), far = limits.filter((limit) => limit > 2 * peak);
  const most = Math.max(peak, ...limits.filter((limit) => limit <= 2 * peak)), scale = (WIDTH - LABEL - 110) / most;
  const used = parts.map((name, at) => ({ name, at })).filter(({ at }) => values.some((row) => row[at] > 0));
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${ROW * rows.length + 4}`, role: "img", "aria-label": summary() });
  const hatch = hatching();
  rows.forEach((name, row) => {
    const y = ROW * row + 3;
    svg.append(s("text", { x: LABEL - 8, y: y + 13, class: "end" }, name.length > 16 ? `${name.slice(0, 15)}…` : name));
    let x = LABEL;
    for (const { name: part, at } of used) {
      const width = Math.max(0, values[row][at]) * scale;
      if (!(width > 0)) continue;
      const bar = s("rect", { x, y, width, height: ROW - 5, fill: STAGES[at % STAGES.length] }, s("title", {}, `${name}, ${part}: ${shown(values[row][at], unit)}`));
      svg.append(bar);
      if (part === "padding" || part === "bubble") svg.append(s("rect", { x, y, width, height: ROW - 5, class: "hatched", fill: hatch.fill }));
      x += width;
    }
    for (const cut of (cuts[row] ?? []).slice(0, MOST_CUTS)) svg.append(s("line", { x1: LABEL + cut * scale, x2: LABEL + cut * scale, y1: y, y2: y + ROW - 5, class: "cut" }));
    svg.append(s("text", { x: x + 6, y: y + 13 }, shown(sums[row], unit)));
    if (limits[row] <= 2 * peak) {
      const at = LABEL + limits[row] * scale;
      svg.append(s("line", { x1: at, x2: at, y1: y - 2, y2: y + ROW - 4, class: "limit" }, s("title", {}, `limit: ${shown(limits[row], unit)}`)));
    }
  });
  svg.prepend(hatch.pattern);
  const legend = h("ul", { class: "legend" }, used.map(({ name, at }) => h("li", {}, swatch(STAGES[at % STAGES.length]), name)),
    limits.length && !far.length ? h("li", {}, "| limit") : null,
    far.length ? h("li", {}, `limit ${shown(Math.min(...far), unit)}, beyond the axis`) : null);
  function summary() {
    const at = sums.indexOf(peak);
    return `${title}: ${plural(rows.length, "row")}, the longest ${rows[at] ?? ""} with ${shown(peak, unit)}`;
  }
  const columns = ["row", ...parts, "sum", ...(limits.length ? ["limit"] : [])];
  const lines = () => rows.map((name, row) => [name, ...values[row], sums[row], ...(limits.length ? [limits[row]] : [])]);
  const numbers = h("details", {}, h("summary", {}, "as a table"),
    table({ title, columns, units: ["text", ...columns.slice(1).map(() => unit)], rows: lines() }, open));
  return figure(title, h("div", {}, svg, legend, numbers), csvButton(title, columns, lines), svgButton(title, svg));
}

/** A small square of a colour. */
export const swatch = (colour) => s("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, s("rect", { width: 10, height: 10, fill: colour }));

let hatchings = 0;

/** A pattern of stripes for one chart, and what to fill rectangles of the class `hatched` with. */
export function hatching() {
  const id = `hatch-${hatchings++}`;
  const stripe = s("rect", { width: 2, height: 6, fill: "#ffffff", opacity: 0.55 });
  return { pattern: s("defs", {}, s("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, stripe)), fill: `url(#${id})` };
}
