// The part of an axis that is in view, and how wheel, drag, pinch and keys change it.

const STEP = 0.2, FINEST = 1e-9;

/** An interval within limits; whoever listens is told once per frame. */
export class Viewport {
  constructor(low, high) {
    this.low = low;
    this.high = Math.max(high, low + 1e-9);
    this.from = this.low;
    this.to = this.high;
    this.listeners = [];
    this.waiting = false;
  }
  get span() { return this.to - this.from; }
  /** Shows an interval, moved back where it would leave the limits. */
  show(from, to) {
    const whole = this.high - this.low, span = Math.min(whole, Math.max(to - from, whole * FINEST));
    this.from = Math.min(Math.max(from, this.low), this.high - span);
    this.to = this.from + span;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.listeners.forEach((tell) => tell());
    });
  }
  pan(share) { this.show(this.from + share * this.span, this.to + share * this.span); }
  /** Zooms by a factor about a point, which stays where it is. */
  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min(this.span * factor, this.high - this.low), share = (at - this.from) / this.span;
    this.show(at - share * span, at - share * span + span);
  }
}

/** Lets a canvas steer a viewport: `at` says which value lies under an x of the page's pixels; `rows` moves up and down, if given. */
export function steered(canvas, view, at, rows = () => {}) {
  const touching = new Map();
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey) view.pan(Math.sign(event.deltaY || event.deltaX) * STEP / 2);
    else if (event.ctrlKey || !event.altKey) view.zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, at(event.offsetX));
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.shiftKey) return; // which selects, where anything can be selected
    touching.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!touching.has(event.pointerId)) return;
    const before = [...touching.values()];
    const moved = event.offsetX - touching.get(event.pointerId);
    touching.set(event.pointerId, event.offsetX);
    const after = [...touching.values()];
    if (before.length === 2) {
      const [was, is] = [Math.abs(before[0] - before[1]), Math.abs(after[0] - after[1])];
      if (is > 4) view.zoom(was / is, at((after[0] + after[1]) / 2));
    } else view.show(view.from - (at(moved) - at(0)), view.to - (at(moved) - at(0)));
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => touching.delete(event.pointerId));
  canvas.addEventListener("keydown", (event) => {
    const act = {
      a: () => view.pan(-STEP), ArrowLeft: () => view.pan(-STEP), d: () => view.pan(STEP), ArrowRight: () => view.pan(STEP),
      w: () => view.zoom(1 / 1.5), "+": () => view.zoom(1 / 1.5), s: () => view.zoom(1.5), "-": () => view.zoom(1.5),
      Home: () => view.show(view.low, view.high), ArrowUp: () => rows(-1), ArrowDown: () => rows(1),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    act();
    event.preventDefault();
  });
}

/** The canvas made as sharp as the screen; the context measured in the page's pixels. */
export function sharp(canvas) {
  const ratio = globalThis.devicePixelRatio || 1, width = canvas.clientWidth || 900, height = canvas.clientHeight || 200;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height, ratio };
}

/** About `count` round values between two. */
export function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = power * [1, 2, 5, 10].find((one) => power * one >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) found.push(at);
  return found;
}
