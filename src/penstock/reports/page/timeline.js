// The timeline: a row for each rank or device, what was predicted below what was measured, memory on the same axis.
import { h, figure } from "./dom.js";
import { SPANS, STAGES, ink, rgb, themed } from "./colours.js";
import { decimated } from "./curves.js";
import { csvButton, pngButton, save, slug } from "./download.js";
import { addExact, addLevels, levelsOf, onPaper } from "./shares.js";
import { peers } from "./peers.js";
import { handOver } from "./perfetto.js";
import { find, spanAfter, starts, sums } from "./spans.js";
import { swatch } from "./stack.js";
import { plural, shown } from "./units.js";
import { sharp, steered, ticks, Viewport } from "./viewport.js";

const LEFT = 150, TOP = 18, MEMORY = 110, MOST_HEIGHT = 620, STRIP = 34, WALKED = 600000, BINS = 2048, MOST_LINES = 8, MOST_SUMMED = 64, MOST_CSV = 200000;

/** Lanes of one name are one row: the steps of a prediction. */
function rowsOf(lanes) {
  const found = new Map();
  for (const lane of lanes) {
    if (!found.has(lane.name + lane.role)) found.set(lane.name + lane.role, { name: lane.name, group: lane.group, role: lane.role, lanes: [] });
    const row = found.get(lane.name + lane.role);
    if (lane.role === "sends" && row.lanes.length) found.set(lane.name + found.size, { ...row, lanes: [lane] }); // overlapping sends have a row each
    else row.lanes.push(lane);
  }
  return [...found.values()];
}

/** Rows of devices; what they send lies beside, and the critical path runs through them. */
const works = (row) => row.role !== "sends" && row.role !== "critical";

export function timeline(block, open, viewer) {
  const { title, kinds, lanes, memory, marks } = block, length = inNanoseconds(block.length_ns, block.tick_ns);
  const start = starts(lanes, inNanoseconds(block.gap_ns, block.tick_ns), length);
  block = { ...block, length_ns: length };
  const ends = lanes.filter((lane) => lane.count).map((lane) => lane.begin_ns + start[lane.first + lane.count - 1] + length[lane.first + lane.count - 1]);
  const view = new Viewport(Math.min(0, ...lanes.map((lane) => lane.begin_ns)), ends.reduce((most, end) => Math.max(most, end), 1));
  const all = rowsOf(lanes), roles = [...new Set(all.map((row) => row.role))], groups = [...new Set(all.map((row) => row.group))];
  const hidden = new Set();
  const onPath = critical(block, start);
  let group = "", rows = all, levels = null, hovered = null, chosen = null, linked = { from: null, to: null }, selected = null, later = 0;

  const canvas = h("canvas", { tabindex: 0, class: "timeline", role: "application", "aria-label": `${title}: ${plural(all.length, "row")}, ${plural(length.length, "span")}. Keys: A and D move, W and S zoom, Home shows all, P and N go to the sender and the receiver of an instruction, M selects what is in view, Escape ends that.` });
  const strip = h("canvas", { class: "strip", "aria-hidden": "true" });
  const said = h("p", { class: "hover", "aria-live": "polite" }, "\u00a0"), summed = h("p", { class: "sums" });
  const rowHeight = () => Math.max(0.3, Math.min(20, MOST_HEIGHT / Math.max(1, rows.length)));
  const lanesHeight = () => Math.min(MOST_HEIGHT, rowHeight() * rows.length);
  const plot = () => Math.max(50, (canvas.clientWidth || 900) - LEFT - 8), at = (px) => view.from + (px - LEFT) / plot() * view.span;
  const x = (time, width) => LEFT + (time - view.from) / view.span * width;
  const resize = () => { canvas.style.height = `${TOP + lanesHeight() + (memory.length ? MEMORY + 24 : 18)}px`; };
  const inView = (row) => row.lanes.filter((lane) => lane.count && lane.begin_ns + start[lane.first] < view.to && lane.begin_ns + start[lane.first + lane.count - 1] + length[lane.first + lane.count - 1] > view.from);
  const countIn = (lane) => spanAfter(lane, start, length, view.to - lane.begin_ns) - spanAfter(lane, start, length, view.from - lane.begin_ns) + 1;
  steered(canvas, view, at);

  function draw() {
    const { pen, width: whole, ratio } = sharp(canvas), width = plot(), high = rowHeight(), background = rgb(toHex(themed("--paper")));
    const counts = rows.map((row) => inView(row).reduce((sum, lane) => sum + countIn(lane), 0)), total = counts.reduce((sum, one) => sum + one, 0);
    const tints = tintsOf(kinds, background), walked = total <= WALKED;
    if (!walked && !levels) levels = new Map();
    const dense = rows.map((row, number) => high < 3 || counts[number] * 3 > width), wide = Math.round(width * ratio), tall = Math.round(lanesHeight() * ratio);
    const image = pen.createImageData(wide, Math.max(1, tall)), pixels = new Uint32Array(image.data.buffer), line = new Uint32Array(wide), mixed = new Float32Array(3 * wide);
    let last = -1;
    for (let y = 0; y < tall; y++) {
      const number = Math.min(rows.length - 1, Math.floor(y / ratio / high));
      if (!dense[number] || (high >= 3 && y / ratio - number * high > high - 1)) continue;
      if (number !== last) fillLine((last = number));
      pixels.set(line, y * wide);
    }
    pen.putImageData(image, Math.round(LEFT * ratio), Math.round(TOP * ratio));
    rows.forEach((row, number) => { if (!dense[number]) bars(pen, row, TOP + number * high, high, width); });
    names(pen, high);
    axis(pen, width, whole);
    if (memory.length) drawMemory(pen, TOP + lanesHeight() + 20, width);
    drawLinks(pen, high, width);
    drawSelection(pen, high, width);
    drawStrip();
    clearTimeout(later);
    later = setTimeout(sumUp, 150);

    function fillLine(number) {
      const row = rows[number];
      mixed.fill(0);
      if (walked) for (const lane of inView(row)) addExact(lane, start, length, block.kind, tints(row.role), view.from, view.to, wide, mixed);
      else {
        if (!levels.has(row)) levels.set(row, levelsOf(whole_(row, BINS, tints), BINS));
        addLevels(levels.get(row), view.low, view.high, view.from, view.to, wide, mixed);
      }
      onPaper(mixed, background, wide, line);
    }
  }

  /** A row over the whole axis. */
  function whole_(row, width, tints, into = new Float32Array(3 * width)) {
    for (const lane of row.lanes) addExact(lane, start, length, block.kind, tints(row.role), view.low, view.high, width, into);
    return into;
  }

  function bars(pen, row, top, high, width) {
    const tall = Math.max(1, row.role === "measured" ? high - 1 : high - 3);
    for (const lane of inView(row)) {
      for (let span = spanAfter(lane, start, length, view.from - lane.begin_ns); span < lane.first + lane.count && lane.begin_ns + start[span] < view.to; span++) {
        const left = Math.max(LEFT, x(lane.begin_ns + start[span], width)), right = Math.min(LEFT + width, x(lane.begin_ns + start[span] + length[span], width));
        const kind = kinds[block.kind[span]], fill = SPANS[kind.colour];
        pen.fillStyle = fill;
        pen.globalAlpha = row.role === "measured" ? 1 : 0.75;
        pen.fillRect(left, top, right - left, tall);
        pen.globalAlpha = 1;
        if (right - left > 5) { pen.fillStyle = themed("--paper"); pen.fillRect(right - 0.75, top, 0.75, tall); }
        const name = label(span);
        if (tall > 9 && right - left > 7 * name.length + 4) {
          pen.fillStyle = ink(fill);
          pen.textAlign = "center";
          pen.fillText(name, (left + right) / 2, top + tall / 2 + 4);
        }
        if (onPath[span] && row.role !== "critical") { pen.fillStyle = themed("--ink"); pen.fillRect(left, top + tall - 2, Math.max(1, right - left - 1), 2); }
        if (hovered === span) { pen.strokeStyle = themed("--ink"); pen.lineWidth = 2; pen.strokeRect(left + 1, top, Math.max(1, right - left - 2), tall); }
      }
    }
  }

  /** Where a span lies: left, right, top and height, or null where its row is not shown. */
  function place({ lane, span }, high, width) {
    const number = rows.findIndex((row) => row.lanes.includes(lane)), from = lane.begin_ns + start[span];
    return number < 0 ? null : { left: x(from, width), right: x(from + length[span], width), top: TOP + number * high, high };
  }
  /** Frames around sender and receiver of what is chosen, and lines from one to the next. */
  function drawLinks(pen, high, width) {
    if (!chosen) return;
    const [own, from, to] = [chosen, linked.from, linked.to].map((one) => one && place(one, high, width));
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, width, lanesHeight());
    pen.clip();
    pen.strokeStyle = themed("--ink");
    pen.lineWidth = 1.5;
    for (const [a, b] of [[from, own], [own, to]]) {
      if (!a || !b) continue;
      pen.beginPath();
      pen.moveTo(a.right, a.top + a.high / 2);
      pen.lineTo(b.left, b.top + b.high / 2);
      pen.stroke();
    }
    for (const [one, dashes] of [[from, [3, 2]], [own, []], [to, []]]) {
      if (!one) continue;
      pen.setLineDash(dashes);
      pen.strokeRect(one.left, one.top, Math.max(2, one.right - one.left - 1), Math.max(1, one.high - 2));
    }
    pen.restore();
  }
  function drawSelection(pen, high, width) {
    if (!selected) return;
    const left = Math.max(LEFT, x(selected.from, width)), right = Math.min(LEFT + width, x(selected.to, width)), top = TOP + selected.first * high;
    pen.fillStyle = themed("--link");
    pen.globalAlpha = 0.18;
    pen.fillRect(left, top, Math.max(0, right - left), (selected.last - selected.first + 1) * high);
    pen.globalAlpha = 1;
  }
  function choose(one) {
    chosen = one;
    linked = one ? peers(block, start, one.lane, one.span) : { from: null, to: null };
    if (one) { hovered = one.span; said.textContent = describe({ row: all.find((row) => row.lanes.includes(one.lane)), ...one }); }
    draw();
  }
  /** Goes on to a peer of what is chosen, keeping how far one has zoomed unless it would be hidden. */
  function follow(one) {
    if (!one) return;
    const from = one.lane.begin_ns + start[one.span], half = Math.max(view.span, 3 * length[one.span]) / 2, middle = from + length[one.span] / 2;
    if (from < view.from || from + length[one.span] > view.to) view.show(middle - half, middle + half);
    choose(one);
  }
  canvas.addEventListener("keydown", (event) => {
    const act = { n: () => follow(linked.to), p: () => follow(linked.from), m: () => select(view.from, view.to, 0, rows.length - 1), Escape: () => { selected = null; choose(null); } }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    act();
    event.preventDefault();
  });
  function select(from, to, first, last) {
    const low = Math.min(first, last), high = Math.max(first, last), within = (row) => Math.max(0, Math.min(rows.length - 1, row));
    selected = { from: Math.min(from, to), to: Math.max(from, to), first: within(low), last: within(high) };
    draw();
  }
  let pressed = null;
  const rowAt = (event) => Math.floor((event.offsetY - TOP) / rowHeight());
  canvas.addEventListener("pointerdown", (event) => {
    pressed = { x: event.offsetX, y: event.offsetY, row: rowAt(event), selects: event.shiftKey };
    if (event.shiftKey) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => { if (pressed?.selects && event.buttons) select(at(pressed.x), at(event.offsetX), pressed.row, rowAt(event)); });
  canvas.addEventListener("pointerup", (event) => {
    const still = pressed && !pressed.selects && Math.abs(event.offsetX - pressed.x) + Math.abs(event.offsetY - pressed.y) < 4, under = still ? spanAt(event) : null;
    pressed = null;
    if (still) choose(under && under.span !== null ? under : null);
  });

  const label = (span) => `${kinds[block.kind[span]].letter}${block.micro_batch[span] >= 0 ? block.micro_batch[span] : ""}`;

  function names(pen, high) {
    pen.fillStyle = themed("--ink");
    pen.textAlign = "right";
    const each = Math.ceil(12 / high);
    rows.forEach((row, number) => { if (number % each === 0) pen.fillText(row.name.length > 22 ? `${row.name.slice(0, 21)}…` : row.name, LEFT - 6, TOP + number * high + Math.min(high, 13) - 1); });
  }

  function axis(pen, width, whole) {
    pen.fillStyle = themed("--muted");
    pen.strokeStyle = themed("--line");
    pen.textAlign = "center";
    for (const tick of ticks(view.from, view.to, width / 110)) pen.fillText(shown(Number((tick * 1e-9).toPrecision(9)), "time"), x(tick, width), 12);
    pen.setLineDash([2, 3]);
    let written = -Infinity; // where the last name ends: names do not overlap
    for (const [moment, name] of marks) {
      if (moment < view.from || moment > view.to) continue;
      pen.beginPath();
      pen.moveTo(x(moment, width), TOP);
      pen.lineTo(x(moment, width), TOP + lanesHeight());
      pen.strokeStyle = themed("--ink");
      pen.stroke();
      if (x(moment, width) < written) continue;
      pen.textAlign = "left";
      pen.fillText(name, Math.min(x(moment, width) + 3, whole - 50), TOP + lanesHeight() + 12);
      written = x(moment, width) + pen.measureText(name).width + 8;
    }
    pen.setLineDash([]);
  }

  function drawMemory(pen, top, width) {
    const most = memory.map((one) => one.bytes.reduce((high, value) => Math.max(high, value), 0)), shownOnes = memory.map((_, number) => number).sort((a, b) => most[b] - most[a]).slice(0, MOST_LINES);
    const limit = Math.min(...shownOnes.map((number) => memory[number].limit_bytes ?? Infinity)), peak = Math.max(1, ...most);
    const high = limit <= 2 * peak ? Math.max(limit, peak) : peak, y = (value) => top + MEMORY - value / high * (MEMORY - 14);
    pen.fillStyle = themed("--muted");
    pen.textAlign = "right";
    pen.fillText(shown(high, "bytes"), LEFT - 6, y(high) + 4);
    pen.fillText("memory", LEFT - 6, top + MEMORY);
    if (limit <= 2 * peak) {
      pen.strokeStyle = themed("--ink");
      pen.setLineDash([4, 4]);
      pen.strokeRect(LEFT, y(limit), width, 0);
      pen.setLineDash([]);
    } else if (limit < Infinity) { pen.textAlign = "left"; pen.fillText(`limit ${shown(limit, "bytes")}, beyond the axis`, LEFT + 4, top + 8); }
    shownOnes.forEach((number, order) => {
      const { time_ns: time, bytes: held } = memory[number], { least, most: top_ } = decimated(time, held, view.from, view.to, Math.round(width));
      let last = 0;
      for (let before = 0; before < time.length && time[before] < view.from; before++) last = held[before];
      pen.strokeStyle = STAGES[order % STAGES.length];
      pen.lineWidth = 1.2;
      pen.beginPath();
      pen.moveTo(LEFT, y(last));
      for (let px = 0; px < least.length; px++) {
        if (least[px] !== least[px]) continue;
        pen.lineTo(LEFT + px, y(last));
        pen.lineTo(LEFT + px, y(top_[px]));
        pen.lineTo(LEFT + px, y(least[px]));
        last = least[px];
      }
      pen.lineTo(LEFT + width, y(last));
      pen.stroke();
    });
  }

  let overview = null;
  function drawStrip() {
    const { pen, width: whole, ratio } = sharp(strip), width = plot(), wide = Math.round(width * ratio);
    if (!overview || overview.width !== wide) {
      const total = new Float32Array(3 * wide), some = all.filter(works).slice(0, MOST_SUMMED), paper = rgb(toHex(themed("--paper")));
      for (const row of some) whole_(row, wide, tintsOf(kinds, paper), total);
      overview = pen.createImageData(wide, 1);
      onPaper(total.map((value) => value / Math.max(1, some.length)), paper, wide, new Uint32Array(overview.data.buffer));
    }
    const tall = Math.round((STRIP - 6) * ratio);
    for (let y = 0; y < tall; y++) pen.putImageData(overview, Math.round(LEFT * ratio), y);
    const from = LEFT + (view.from - view.low) / (view.high - view.low) * width, to = LEFT + (view.to - view.low) / (view.high - view.low) * width;
    pen.strokeStyle = themed("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(Math.min(from, whole - 4), 1, Math.max(2, to - from), STRIP - 8);
    pen.fillStyle = themed("--muted");
    pen.textAlign = "right";
    pen.fillText("all of it", LEFT - 6, 18);
  }
  const centre = (event) => { const middle = view.low + (event.offsetX - LEFT) / plot() * (view.high - view.low), half = view.span / 2; view.show(middle - half, middle + half); };
  strip.addEventListener("pointerdown", centre);
  strip.addEventListener("pointermove", (event) => { if (event.buttons) centre(event); });

  function sumUp() {
    const from = selected?.from ?? view.from, to = selected?.to ?? view.to, span = to - from, own_ = selected ? rows.slice(selected.first, selected.last + 1) : rows;
    const shownRows = own_.some(works) ? own_.filter(works) : own_, measured = shownRows.some((row) => row.role === "measured") ? shownRows.filter((row) => row.role === "measured") : shownRows;
    const own = measured.flatMap((row) => row.lanes), found = sums(block, start, own, from, to), all_ = Math.max(1e-9, span * measured.length), parts = {};
    found.forEach((time, kind) => { parts[kinds[kind].colour] = (parts[kinds[kind].colour] ?? 0) + time; });
    const text = Object.entries(parts).filter(([, time]) => time > 0).map(([name, time]) => `${name} ${shown(time / all_, "share")}`);
    const busy = Object.values(parts).reduce((sum, one) => sum + one, 0);
    summed.textContent = `${selected ? "Selected" : "In view"}, ${shown(span * 1e-9, "time")} of ${plural(measured.length, "row")}: ${[...text, `nothing ${shown(Math.max(0, 1 - busy / all_), "share")}`].join(", ")}.`;
    canvas.dataset.busy = String(busy / all_);
  }

  function spanAt(event) {
    const row = rows[Math.floor((event.offsetY - TOP) / rowHeight())], moment = at(event.offsetX);
    for (const lane of row && event.offsetX >= LEFT ? row.lanes : []) {
      const span = spanAfter(lane, start, length, moment - lane.begin_ns);
      if (span < lane.first + lane.count && lane.begin_ns + start[span] <= moment) return { row, lane, span };
    }
    return row ? { row, span: null } : null;
  }
  canvas.addEventListener("pointermove", (event) => {
    const under = spanAt(event);
    if (chosen || pressed || (under?.span === hovered && hovered !== null)) return; // what was chosen by a click stays
    hovered = under?.span ?? null;
    said.textContent = describe(under);
    draw();
  });
  function describe(under) {
    if (!under) return "\u00a0";
    if (under.span === null) return `${under.row.name}: nothing here`;
    const { row, lane, span } = under, place = block.stage[span] >= 0 ? `, stage ${block.stage[span]}` : "", from = lane.begin_ns + start[span];
    return `${row.name}: ${label(span)} (${kinds[block.kind[span]].name})${place}, ${shown(length[span] * 1e-9, "time")} = ${length[span]} ns, from ${shown(from * 1e-9, "time")} = ${from} ns${chosen ? tellPeers() : ""}`;
  }
  const tellPeers = () => [["from", linked.from], ["to", linked.to]].filter(([, one]) => one).map(([way, one]) => `; ${way} ${one.lane.name}: ${label(one.span)}, stage ${block.stage[one.span]}`).join("");

  const jump = h("input", { type: "search", placeholder: "F17 stage 3", "aria-label": "jump to an instruction", size: 14, change: () => {
    const found = find(block, jump.value);
    if (!found) { said.textContent = `There is no ${jump.value || "such instruction"} here.`; return; }
    const [number, span] = found, lane = lanes[number], from = lane.begin_ns + start[span];
    view.show(from - 2 * length[span], from + 3 * length[span]);
    choose({ lane, span });
  } });
  const filter = () => {
    rows = all.filter((row) => !hidden.has(row.role) && (!group || row.group === group));
    resize();
    draw();
  };
  const controls = h("p", { class: "controls" }, jump,
    groups.length > 1 ? h("select", { "aria-label": "rows to show", change: (event) => { group = event.target.value; filter(); } },
      h("option", { value: "" }, "all rows"), groups.map((name) => h("option", { value: name }, name))) : null,
    roles.length > 1 ? roles.map((role) => h("label", {}, h("input", { type: "checkbox", checked: true, change: (event) => { hidden[event.target.checked ? "delete" : "add"](role); filter(); } }), role)) : null,
    h("button", { type: "button", click: () => view.show(view.low, view.high) }, "show all"));
  const used = [...new Set(kinds.map((kind) => kind.colour))];
  const legend = h("ul", { class: "legend" }, used.map((name) => h("li", {}, swatch(SPANS[name]), `${[...new Set(kinds.filter((kind) => kind.colour === name).map((kind) => kind.letter))].join(" ")} ${name}`)));
  const lines = () => lanes.flatMap((lane) => Array.from({ length: lane.count }, (_, each) => {
    const span = lane.first + each;
    return [lane.name, lane.role, kinds[block.kind[span]].name, block.stage[span], block.micro_batch[span], lane.begin_ns + start[span], length[span]];
  })).slice(0, MOST_CSV);
  const trace = () => {
    const events = all.flatMap((row, pid) => [{ ph: "M", name: "process_name", pid, args: { name: row.name } }, ...row.lanes.flatMap((lane) =>
      Array.from({ length: lane.count }, (_, each) => lane.first + each).map((span) => ({ ph: "X", pid, tid: 0, name: label(span), cat: kinds[block.kind[span]].name,
        ts: (lane.begin_ns + start[span]) / 1e3, dur: length[span] / 1e3, args: { stage: block.stage[span], micro_batch: block.micro_batch[span] } })))]);
    return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
  };
  const saveTrace = () => save(`${slug(title)}.trace.json`, trace(), "application/json");
  const perfetto = viewer ? h("button", { type: "button", title: `opens ${viewer} in a new window, which needs the network`, click: () => handOver(viewer, new TextEncoder().encode(trace()), title, (words) => { said.textContent = words; }) }, "open in Perfetto (needs the network)") : null;
  view.listeners.push(draw);
  resize();
  const element = figure(title, h("div", {}, controls, strip, canvas, said, summed, legend),
    h("button", { type: "button", click: saveTrace }, "save trace"), perfetto, csvButton(title, ["row", "role", "kind", "stage", "micro-batch", "start_ns", "length_ns"], lines), pngButton(title, canvas));
  element.redraw = () => { overview = levels = null; draw(); };
  element.timeline = { view, draw }; // for whoever measures how fast it is
  return element;
}

/** Colours of each kind as differences to the paper; what was predicted is paler than what was measured. */
function tintsOf(kinds, paper) {
  const found = { measured: new Float32Array(3 * kinds.length), other: new Float32Array(3 * kinds.length) };
  kinds.forEach((kind, number) => rgb(SPANS[kind.colour]).forEach((value, channel) => {
    found.measured[3 * number + channel] = value - paper[channel];
    found.other[3 * number + channel] = 0.75 * (value - paper[channel]);
  }));
  return (role) => (role === "measured" ? found.measured : found.other);
}

/** For each span whether it is on a critical path, by when it is what of which micro-batch; none where no path is known. */
function critical({ lanes, kind, stage, micro_batch: micro }, start) {
  const keyOf = (lane, span) => `${lane.begin_ns + start[span]} ${kind[span]} ${stage[span]} ${micro[span]}`, spans = (lane) => Array.from({ length: lane.count }, (_, each) => lane.first + each);
  const paths = lanes.filter((lane) => lane.role === "critical"), path = new Set(paths.flatMap((lane) => spans(lane).map((span) => keyOf(lane, span)))), found = new Uint8Array(kind.length);
  for (const lane of paths.length ? lanes : []) if (lane.role === "predicted" || lane.role === "sends") for (const span of spans(lane)) if (path.has(keyOf(lane, span))) found[span] = 1;
  return found;
}

/** Times of a page with very many spans come in coarser ticks. A loop: `from` with a function takes a second for two million. */
function inNanoseconds(values, tick) {
  if (tick === 1) return values;
  const found = new Float64Array(values.length);
  for (let at = 0; at < values.length; at++) found[at] = values[at] * tick;
  return found;
}

const toHex = (colour) => (/^#[0-9a-f]{6}$/i.test(colour) ? colour : "#ffffff");
