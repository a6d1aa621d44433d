// Spans shorter than a pixel: a pixel mixes their colours by their shares of its time, and never shows the one that was painted last.
// Colours are told as differences to the paper, [red, green, blue] of each kind, so that a sum of them lies on it as it is.
import { spanAfter } from "./spans.js";

/** Adds the colours of a lane's spans to `width` pixels from `from` to `to`, exactly. */
export function addExact(lane, start, length, kind, tints, from, to, width, into) {
  const begin = from - lane.begin_ns, each = (to - from) / width, end = begin + each * width, last = lane.first + lane.count;
  for (let at = spanAfter(lane, start, length, begin); at < last && start[at] < end; at++) {
    const left = Math.max(0, (start[at] - begin) / each), right = Math.min(width, (start[at] + length[at] - begin) / each), own = 3 * kind[at];
    const red = tints[own], green = tints[own + 1], blue = tints[own + 2], stop = Math.min(width - 1, Math.floor(right));
    for (let pixel = Math.floor(left); pixel <= stop; pixel++) {
      const share = Math.min(pixel + 1, right) - Math.max(pixel, left), to_ = 3 * pixel;
      into[to_] += share * red;
      into[to_ + 1] += share * green;
      into[to_ + 2] += share * blue;
    }
  }
  return into;
}

/** A row in bins over the whole axis, and in half, a quarter … as many: what is drawn while too many spans are in view to walk through. */
export function levelsOf(exact, bins) {
  const levels = [exact];
  for (let count = bins / 2; count >= 64; count /= 2) {
    const finer = levels[levels.length - 1], coarser = new Float32Array(3 * count);
    for (let bin = 0; bin < count; bin++) for (let channel = 0; channel < 3; channel++) coarser[3 * bin + channel] = (finer[6 * bin + channel] + finer[6 * bin + 3 + channel]) / 2;
    levels.push(coarser);
  }
  return levels;
}

/** Adds the means of the bins below each pixel, of the coarsest level that is still finer than pixels. */
export function addLevels(levels, low, high, from, to, width, into) {
  const wanted = width * (high - low) / (to - from), held = levels.findLast((level) => level.length / 3 >= wanted) ?? levels[0];
  const bins = held.length / 3, scale = bins / (high - low), step = (to - from) / width * scale;
  let left = (from - low) * scale;
  for (let pixel = 0; pixel < width; pixel++, left += step) {
    const right = Math.min(bins, left + step), weight = 1 / Math.max(1e-12, right - left);
    for (let bin = Math.floor(left); bin < right; bin++) {
      const share = (Math.min(bin + 1, right) - Math.max(bin, left)) * weight;
      for (let channel = 0; channel < 3; channel++) into[3 * pixel + channel] += held[3 * bin + channel] * share;
    }
  }
  return into;
}

/** Pixels of a line of a picture: the paper with the colours on it. */
export function onPaper(colours, paper, width, line) {
  const bounded = (value) => (value < 0 ? 0 : value > 255 ? 255 : value + 0.5) | 0;
  for (let pixel = 0; pixel < width; pixel++) {
    const at = 3 * pixel;
    line[pixel] = 0xff000000 | (bounded(paper[2] + colours[at + 2]) << 16) | (bounded(paper[1] + colours[at + 1]) << 8) | bounded(paper[0] + colours[at]);
  }
}
