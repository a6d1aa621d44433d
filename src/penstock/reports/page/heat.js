// A map of rows (ranks) by columns (steps): usual is pale, slow is dark, fast is blue; what is not known is empty.
import { h, figure } from "./dom.js";
import { themed } from "./colours.js";
import { csvButton, pngButton } from "./download.js";
import { plural } from "./units.js";
import { sharp } from "./viewport.js";

const LEFT = 78;

/** The colour of a ratio to the usual: darker orange above 1, darker blue below. */
export function tint(ratio) {
  if (!Number.isFinite(ratio)) return null;
  const strength = Math.min(1, Math.abs(Math.log2(Math.max(ratio, 1e-6))));
  const [red, green, blue] = ratio >= 1 ? [213, 94, 0] : [0, 114, 178];
  const mix = (end) => Math.round(235 + (end - 235) * strength);
  return `rgb(${mix(red)},${mix(green)},${mix(blue)})`;
}

export function heat({ title, rows, x_name: xName, x, values }) {
  const high = Math.max(6, Math.min(22, 440 / rows.length)), canvas = h("canvas", { tabindex: 0, role: "img", class: "curves", "aria-label": summary() });
  const said = h("p", { class: "hover", "aria-live": "polite" }, "\u00a0");
  canvas.style.height = `${high * rows.length + 22}px`;
  function draw() {
    const { pen, width } = sharp(canvas), wide = (width - LEFT - 8) / Math.max(1, x.length);
    rows.forEach((name, row) => {
      for (let at = 0; at < x.length; at++) {
        const colour = tint(values[row * x.length + at]);
        if (colour) { pen.fillStyle = colour; pen.fillRect(LEFT + at * wide, row * high, Math.max(1, wide - 0.5), high - 1); }
      }
      if (high >= 11 || row % Math.ceil(11 / high) === 0) { pen.fillStyle = themed("--muted"); pen.textAlign = "right"; pen.fillText(name, LEFT - 6, row * high + Math.min(high, 13)); }
    });
    pen.fillStyle = themed("--muted");
    pen.textAlign = "left";
    if (x.length) pen.fillText(`${xName} ${x[0]} to ${x[x.length - 1]}`, LEFT, high * rows.length + 15);
  }
  canvas.addEventListener("pointermove", (event) => {
    const row = Math.floor(event.offsetY / high), at = Math.floor((event.offsetX - LEFT) / ((canvas.clientWidth - LEFT - 8) / x.length));
    const ratio = values[row * x.length + at];
    said.textContent = row in rows && at >= 0 && at < x.length ? `${rows[row]}, ${xName} ${x[at]}: ${Number.isFinite(ratio) ? `${ratio.toFixed(3)} times the usual` : "not known"}` : "\u00a0";
  });
  function summary() {
    let worst = -1;
    for (let at = 0; at < values.length; at++) if (Number.isFinite(values[at]) && !(values[at] <= values[worst])) worst = at;
    return `${title}: ${plural(rows.length, "row")}, ${plural(x.length, "column")}` + (worst < 0 ? "" : `; the slowest is ${rows[Math.floor(worst / x.length)]} at ${xName} ${x[worst % x.length]}, ${values[worst].toFixed(2)} times the usual`);
  }
  const lines = () => rows.map((name, row) => [name, ...Array.from({ length: x.length }, (_, at) => Number.isFinite(values[row * x.length + at]) ? values[row * x.length + at] : null)]);
  const element = figure(title, h("div", {}, canvas, said), csvButton(title, ["row", ...Array.from(x, (one) => `${xName} ${one}`)], lines), pngButton(title, canvas));
  element.redraw = draw;
  return element;
}
