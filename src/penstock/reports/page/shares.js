// Spans shorter than a pixel: what share of each pixel's time every colour has, never the colour that was painted last.
import { spanAfter } from "./spans.js";

/** Shares of `width` pixels from `from` to `to` in one lane: [pixel * colours + colour], exactly. */
export function exactShares(lane, start, length, colour, colours, from, to, width, into = new Float32Array(width * colours)) {
  into.fill(0);
  const begin = from - lane.begin_ns, each = (to - from) / width, end = begin + each * width;
  for (let at = spanAfter(lane, start, length, begin); at < lane.first + lane.count && start[at] < end; at++) {
    const left = (Math.max(start[at], begin) - begin) / each, right = (Math.min(start[at] + length[at], end) - begin) / each, own = colour[at];
    const last = Math.min(width - 1, Math.floor(right));
    for (let pixel = Math.floor(left); pixel <= last; pixel++) into[pixel * colours + own] += Math.min(pixel + 1, right) - Math.max(pixel, left);
  }
  return into;
}

/** The same in bins over the whole axis, as bytes: what is drawn while too many spans are in view to walk through each frame. */
export function binned(lane, start, length, colour, colours, low, high, bins) {
  const exact = exactShares(lane, start, length, colour, colours, low, high, bins), found = new Uint8Array(exact.length);
  for (let at = 0; at < exact.length; at++) found[at] = Math.min(255, Math.round(exact[at] * 255));
  return found;
}

/** Shares of pixels as means of the bins below them. */
export function fromBins(held, colours, bins, low, high, from, to, width, into = new Float32Array(width * colours)) {
  into.fill(0);
  const scale = bins / (high - low);
  for (let pixel = 0; pixel < width; pixel++) {
    const left = Math.max(0, (from + (to - from) * pixel / width - low) * scale), right = Math.min(bins, (from + (to - from) * (pixel + 1) / width - low) * scale);
    for (let bin = Math.floor(left); bin < right; bin++) {
      const weight = (Math.min(bin + 1, right) - Math.max(bin, left)) / Math.max(1e-12, right - left) / 255;
      for (let own = 0; own < colours; own++) into[pixel * colours + own] += held[bin * colours + own] * weight;
    }
  }
  return into;
}
