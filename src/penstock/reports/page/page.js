// The page: reads its data, draws the views of the plan or run that is chosen, and follows a run that goes on.
import { h } from "./dom.js";
import { chain } from "./chain.js";
import { unpack, withColumns } from "./columns.js";
import { curves } from "./curves.js";
import { command, facts, text } from "./facts.js";
import { heat } from "./heat.js";
import { scatter } from "./scatter.js";
import { stack } from "./stack.js";
import { table } from "./table.js";
import { timeline } from "./timeline.js";

const DRAWN = { Text: text, Command: command, Facts: facts, Table: table, Stack: stack, OpChain: chain, Charts: curves, Scatter: scatter, Heat: heat, Spans: timeline };
const ORDER = ["glance", "notes", "plan", "stages", "candidates", "bound", "pareto", "batch", "timeline", "run", "devices", "compare", "sources"];

/** The views to show, those of the subject and those of all, in the order people read them. */
export const viewsOf = (data, number) => [...(data.subjects[number]?.views ?? []), ...data.shared].sort((a, b) => ORDER.indexOf(a.name) - ORDER.indexOf(b.name));

/** The data of the page with its arrays; `texts` are theirs. */
export async function loaded(data, texts) {
  const arrays = await Promise.all(data.columns.map((column, number) => unpack(column, texts[number])));
  return { ...data, subjects: withColumns(data.subjects, arrays), shared: withColumns(data.shared, arrays) };
}

function show(data, number) {
  const open = (other) => { show(data, other); scrollTo(0, 0); };
  const views = viewsOf(data, number), sections = views.map((view) => h("section", { id: view.name, "aria-labelledby": `${view.name}-title` },
    h("h2", { id: `${view.name}-title` }, view.title), view.blocks.map((block) => DRAWN[block.block](block, open, data.viewer))));
  const choose = data.subjects.length > 1 ? h("label", {}, "show ", h("select", { id: "subject", change: (event) => show(data, Number(event.target.value)) },
    data.subjects.map((one, at) => h("option", { value: at, selected: at === number }, `${one.kind} ${one.name}`)))) : null;
  const nav = h("nav", { "aria-label": "views" }, views.map((view) => h("a", { href: `#${view.name}` }, view.title)), choose);
  const before = document.querySelector("main");
  const main = h("main", {}, h("header", {}, h("h1", { dir: "auto" }, data.title || "Penstock report")), sections);
  if (before) { document.querySelector("nav").replaceWith(nav); before.replaceWith(main); } else document.body.append(nav, main);
  redraw();
}

/** Canvases know their size only when they are in the page. */
const redraw = () => document.querySelectorAll("figure").forEach((one) => one.redraw?.());

async function start() {
  const told = JSON.parse(document.getElementById("data").textContent);
  const texts = told.columns.map((_, number) => document.getElementById(`column-${number}`).textContent);
  show(await loaded(told, texts), 0);
  addEventListener("resize", redraw);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw); // paper is light
  document.body.dataset.ready = "yes";
  if (told.live) follow(told.live, told.seen);
}

/** Draws anew whenever the server says that the run has gone on since the version that was seen; what was chosen and scrolled to stays. */
function follow(address, seen) {
  const news = new EventSource(`${address}/events?${seen}`);
  news.addEventListener("changed", async () => {
    const { data, texts } = await (await fetch(`${address}/data`)).json(), number = Number(document.getElementById("subject")?.value ?? 0), y = scrollY;
    show(await loaded(data, texts), number);
    scrollTo(0, y);
    document.body.dataset.updates = String(Number(document.body.dataset.updates ?? 0) + 1);
  });
}

if (globalThis.document) start();
