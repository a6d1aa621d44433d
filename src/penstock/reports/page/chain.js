// The ops of a model in their order, coloured by stage; what runs again in the backward pass is hatched.
import { h, s, figure } from "./dom.js";
import { ink, stageColour } from "./colours.js";
import { svgButton } from "./download.js";
import { hatching, swatch } from "./stack.js";
import { plural } from "./units.js";

const WIDTH = 900, HEIGHT = 46;

export function chain({ title, ops, stages }) {
  const total = ops.reduce((sum, op) => sum + op.count, 0) || 1, scale = WIDTH / total, hatch = hatching();
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${plural(total, "op")} in ${plural(stages.length, "stage")}` }, hatch.pattern);
  let at = 0;
  for (const { name, count, stage, recomputed } of ops) {
    const box = { x: at * scale, y: 18, width: Math.max(0.3, count * scale - 0.4), height: HEIGHT - 20 };
    const said = `${count} × ${name}, stage ${stage}${recomputed ? ", recomputed" : ""}`;
    svg.append(s("rect", { ...box, fill: stageColour(stage) }, s("title", {}, said)));
    if (recomputed) svg.append(s("rect", { ...box, class: "hatched", fill: hatch.fill }));
    if (box.width > 9 * (name.length + 1)) svg.append(s("text", { x: box.x + box.width / 2, y: 36, class: "middle", fill: ink(stageColour(stage)) }, name));
    at += count;
  }
  at = 0;
  stages.forEach((said, stage) => {
    const own = ops.filter((op) => op.stage === stage).reduce((sum, op) => sum + op.count, 0);
    if (own * scale > 14) svg.append(s("text", { x: (at + own / 2) * scale, y: 12, class: "middle" }, own * scale > 60 ? `stage ${stage}` : stage, s("title", {}, said)));
    at += own;
  });
  const legend = h("ul", { class: "legend rows" }, stages.slice(0, 64).map((said, stage) => h("li", {}, swatch(stageColour(stage)), said)));
  return figure(title, h("div", {}, svg, h("details", {}, h("summary", {}, "stages in words"), legend)), svgButton(title, svg));
}
