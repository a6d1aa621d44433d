// Charts below each other with one x axis: lines of any length, drawn by the least and the most of each pixel.
import { h, figure } from "./dom.js";
import { STAGES, themed } from "./colours.js";
import { csvButton, pngButton } from "./download.js";
import { plural, shown } from "./units.js";
import { sharp, steered, ticks, Viewport } from "./viewport.js";

const LEFT = 78, RIGHT = 12, CHART = 120, GAP = 26;

/** Least, most, first and last of the values whose x lies in each of `width` pixels; [from, to) are indices of sorted x. */
export function decimated(x, y, low, high, width) {
  const least = new Float64Array(width).fill(NaN), most = new Float64Array(width).fill(NaN), scale = width / (high - low || 1);
  for (let at = first(x, low); at < x.length && x[at] <= high; at++) {
    const value = y[at], pixel = Math.min(width - 1, Math.floor((x[at] - low) * scale));
    if (!Number.isFinite(value)) continue;
    if (!(least[pixel] <= value)) least[pixel] = value;
    if (!(most[pixel] >= value)) most[pixel] = value;
  }
  return { least, most };
}

/** The first index whose x is not below a value. */
export function first(x, value) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function curves({ title, x_name: xName, x, charts, steps }) {
  const end = x.length ? x[x.length - 1] : 1, view = new Viewport(x.length ? x[0] : 0, Math.max(end, (x[0] ?? 0) + 1));
  const height = charts.length * (CHART + GAP) + 22, canvas = h("canvas", { tabindex: 0, role: "img", class: "curves", "aria-label": summary() });
  const said = h("p", { class: "hover", "aria-live": "polite" }, "\u00a0");
  canvas.style.height = `${height}px`;
  let hover = -1;
  const plot = () => Math.max(50, (canvas.clientWidth || 900) - LEFT - RIGHT), at = (px) => view.from + (px - LEFT) / plot() * view.span;
  steered(canvas, view, at);
  canvas.addEventListener("pointermove", (event) => {
    hover = nearest(x, at(event.offsetX));
    said.textContent = hover < 0 ? "\u00a0" : `${xName} ${shown(x[hover], "number")}: ` +
      charts.flat().map((curve) => `${curve.name} ${shown(curve.values[hover], curve.unit)}`).join(", ");
    draw();
  });
  canvas.addEventListener("pointerleave", () => { hover = -1; draw(); });
  view.listeners.push(draw);
  function draw() {
    const { pen } = sharp(canvas), width = plot();
    charts.forEach((chart, number) => drawChart(pen, chart, number * (CHART + GAP) + 16, width));
    pen.fillStyle = themed("--muted");
    pen.textAlign = "center";
    for (const tick of ticks(view.from, view.to, width / 90)) pen.fillText(shown(tick, "number"), LEFT + (tick - view.from) / view.span * width, height - 6);
    pen.textAlign = "right";
    pen.fillText(xName, LEFT - 8, height - 6);
  }
  function drawChart(pen, chart, top, width) {
    const own = chart.map((curve) => decimated(x, curve.values, view.from, view.to, Math.round(width)));
    let low = Infinity, high = -Infinity;
    for (const { least, most } of own) for (let at = 0; at < least.length; at++) if (least[at] === least[at]) { low = Math.min(low, least[at]); high = Math.max(high, most[at]); }
    if (!(low <= high)) [low, high] = [0, 1];
    if (low > 0 && low < 0.5 * high) low = 0;
    if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    const y = (value) => top + CHART - (value - low) / (high - low) * CHART;
    pen.strokeStyle = themed("--line");
    pen.fillStyle = themed("--muted");
    pen.textAlign = "right";
    pen.lineWidth = 1;
    for (const tick of ticks(low, high, 4)) {
      pen.beginPath();
      pen.moveTo(LEFT, y(tick));
      pen.lineTo(LEFT + width, y(tick));
      pen.stroke();
      pen.fillText(shown(Number(tick.toPrecision(6)), chart[0].unit), LEFT - 6, y(tick) + 4);
    }
    own.forEach(({ least, most }, number) => {
      pen.strokeStyle = STAGES[number];
      pen.setLineDash(number ? [6, 3] : []);
      pen.lineWidth = 1.5;
      pen.beginPath();
      let last = NaN;
      for (let px = 0; px < least.length; px++) {
        if (least[px] !== least[px]) continue;
        if (last !== last) pen.moveTo(LEFT + px, y(least[px]));
        else if (steps) pen.lineTo(LEFT + px, y(last));
        pen.lineTo(LEFT + px, y(least[px]));
        if (most[px] !== least[px]) pen.lineTo(LEFT + px, y(most[px]));
        last = most[px];
      }
      if (steps && last === last) pen.lineTo(LEFT + width, y(last));
      pen.stroke();
      if (least.reduce((sum, value) => sum + (value === value), 0) < 2) {
        pen.fillStyle = STAGES[number];
        least.forEach((value, px) => { if (value === value) pen.fillRect(LEFT + px - 2, y(value) - 2, 4, 4); });
      }
    });
    pen.setLineDash([]);
    pen.textAlign = "left";
    let right = LEFT;
    chart.forEach((curve, number) => {
      pen.fillStyle = STAGES[number];
      pen.fillText(number ? `- - ${curve.name}` : `— ${curve.name}`, right, top - 4);
      right += pen.measureText(curve.name).width + 44;
    });
    if (hover >= 0 && x[hover] >= view.from && x[hover] <= view.to) {
      const px = LEFT + (x[hover] - view.from) / view.span * width;
      pen.strokeStyle = themed("--muted");
      pen.beginPath();
      pen.moveTo(px, top);
      pen.lineTo(px, top + CHART);
      pen.stroke();
    }
  }
  function summary() {
    const last = (values) => values.findLast(Number.isFinite) ?? NaN;
    return `${title}: ${plural(x.length, "point")}; ` + charts.flat().map((curve) => `${curve.name} ends at ${shown(last(curve.values), curve.unit)}`).join("; ");
  }
  const columns = [xName, ...charts.flat().map((curve) => curve.name)];
  const rows = () => Array.from(x, (value, at) => [value, ...charts.flat().map((curve) => Number.isFinite(curve.values[at]) ? curve.values[at] : null)]);
  const element = figure(title, h("div", {}, canvas, said), csvButton(title, columns, rows), pngButton(title, canvas));
  element.redraw = draw;
  return element;
}

const nearest = (x, value) => {
  const at = first(x, value);
  return x.length === 0 ? -1 : at > 0 && (at === x.length || value - x[at - 1] < x[at] - value) ? at - 1 : at;
};
