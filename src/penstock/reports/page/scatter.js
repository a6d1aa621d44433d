// Choices as points: any two columns, the front of those that no other beats in both, and limits that fade what is beyond them.
import { h, s, figure } from "./dom.js";
import { STAGES } from "./colours.js";
import { csvButton, svgButton } from "./download.js";
import { shown } from "./units.js";
import { ticks } from "./viewport.js";

const WIDTH = 900, HEIGHT = 420, LEFT = 80, BOTTOM = 40, MOST = 2000;

/** Of points (x, y), where less is better, the numbers of those that no other beats, by x. */
export function front(points) {
  const order = points.map((_, at) => at).filter((at) => points[at].every(Number.isFinite)).sort((a, b) => points[a][0] - points[b][0] || points[a][1] - points[b][1]);
  let least = Infinity;
  return order.filter((at) => points[at][1] < least && ((least = points[at][1]), true));
}

export function scatter({ title, columns, units, names, rows, opens }, open) {
  const chosen = [0, 1], limits = [Infinity, Infinity];
  const choice = (axis) => h("select", { "aria-label": axis ? "vertical axis" : "horizontal axis", change: (event) => {
    chosen[axis] = Number(event.target.value);
    limits[axis] = Infinity;
    bars[axis].value = 100;
    draw();
  } }, columns.map((name, at) => h("option", { value: at, selected: at === chosen[axis] }, name)));
  const most = (axis) => Math.max(1e-30, ...rows.map((row) => row[chosen[axis]]).filter(Number.isFinite));
  const bars = [0, 1].map((axis) => h("input", { type: "range", min: 1, max: 100, value: 100, "aria-label": `limit of the ${axis ? "vertical" : "horizontal"} axis`,
    input: (event) => { limits[axis] = Number(event.target.value) === 100 ? Infinity : most(axis) * Number(event.target.value) / 100; draw(); } }));
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group" }), said = h("p", { class: "hover", "aria-live": "polite" });
  function draw() {
    const points = rows.map((row) => chosen.map((at) => row[at] ?? NaN)), best = front(points), tops = [0, 1].map((axis) => most(axis) * 1.06);
    const x = (value) => LEFT + value / tops[0] * (WIDTH - LEFT - 20), y = (value) => HEIGHT - BOTTOM - value / tops[1] * (HEIGHT - BOTTOM - 20);
    const unit = (axis) => units[chosen[axis]];
    svg.replaceChildren();
    for (const tick of ticks(0, tops[0], 8)) svg.append(s("line", { x1: x(tick), x2: x(tick), y1: 20, y2: HEIGHT - BOTTOM, class: "grid" }), s("text", { x: x(tick), y: HEIGHT - 22, class: "middle" }, shown(tick, unit(0))));
    for (const tick of ticks(0, tops[1], 6)) svg.append(s("line", { x1: LEFT, x2: WIDTH - 20, y1: y(tick), y2: y(tick), class: "grid" }), s("text", { x: LEFT - 6, y: y(tick) + 4, class: "end" }, shown(tick, unit(1))));
    svg.append(s("text", { x: WIDTH - 20, y: HEIGHT - 6, class: "end" }, columns[chosen[0]]), s("text", { x: 6, y: 14 }, columns[chosen[1]]));
    svg.append(s("polyline", { points: best.map((at) => `${x(points[at][0])},${y(points[at][1])}`).join(" "), class: "front" }));
    const inside = (at) => points[at][0] <= limits[0] && points[at][1] <= limits[1];
    points.slice(0, MOST).forEach((point, at) => {
      if (!point.every(Number.isFinite)) return;
      const words = `${names[at]}: ${columns[chosen[0]]} ${shown(point[0], unit(0))}, ${columns[chosen[1]]} ${shown(point[1], unit(1))}`;
      const go = () => { said.textContent = words; if (opens[at] !== null && opens[at] !== undefined) open(opens[at]); };
      svg.append(s("circle", { cx: x(point[0]), cy: y(point[1]), r: best.includes(at) ? 6 : 4, fill: best.includes(at) ? STAGES[0] : STAGES[7],
        class: inside(at) ? "point" : "point faded", tabindex: 0, role: "button", "aria-label": words, click: go,
        pointerenter: () => { said.textContent = words; }, keydown: (event) => { if (event.key === "Enter") go(); } }, s("title", {}, words)));
    });
    const left = best.filter(inside).length;
    said.textContent = `${best.length} of ${points.length} choices are not beaten in ${columns[chosen[0]]} and ${columns[chosen[1]]}; ${left} within the limits.`;
  }
  draw();
  const controls = h("p", { class: "controls" }, choice(0), bars[0], choice(1), bars[1]);
  return figure(title, h("div", {}, controls, svg, said), csvButton(title, ["name", ...columns], () => rows.map((row, at) => [names[at], ...row])), svgButton(title, svg));
}
