// The spans of a timeline: where each begins, which one lies under a moment, and what a search text means.

/** Starts in nanoseconds, counted from each lane's begin, from gaps and lengths; shared lanes are decoded once. */
export function starts(lanes, gap, length) {
  const found = new Float64Array(gap.length), done = new Set();
  for (const { first, count } of lanes) {
    if (done.has(first)) continue;
    done.add(first);
    for (let at = first, time = 0; at < first + count; at++) {
      time += gap[at];
      found[at] = time;
      time += length[at];
    }
  }
  return found;
}

/** The first span of a lane that ends after a moment (of the lane's own clock). */
export function spanAfter(lane, start, length, moment) {
  let low = lane.first, high = lane.first + lane.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle] + length[middle] <= moment) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What a text such as "F17 stage 3" asks for; null where it is no such text. */
export function wanted(text) {
  const found = /^\s*([A-Za-z]+|[→←])\s*(\d+)?(?:[\s,]*(?:stage|s)\s*(\d+))?\s*$/i.exec(text);
  return found && { letter: found[1].toUpperCase(), microBatch: found[2] === undefined ? null : Number(found[2]), stage: found[3] === undefined ? null : Number(found[3]) };
}

/** The first span that a text asks for: [number of its lane, number of the span], or null. */
export function find(block, text) {
  const asked = wanted(text);
  if (!asked) return null;
  for (let number = 0; number < block.lanes.length; number++) {
    const lane = block.lanes[number];
    for (let at = lane.first; at < lane.first + lane.count; at++) {
      const kind = block.kinds[block.kind[at]];
      if (kind.letter.toUpperCase() !== asked.letter && kind.name.toUpperCase() !== asked.letter) continue;
      if (asked.microBatch !== null && block.micro_batch[at] !== asked.microBatch) continue;
      if (asked.stage !== null && block.stage[at] !== asked.stage) continue;
      return [number, at];
    }
  }
  return null;
}

/** Time of each kind between two moments, over some lanes: what a selection sums up to. */
export function sums(block, start, lanes, from, to) {
  const found = new Float64Array(block.kinds.length);
  for (const lane of lanes) {
    const begin = from - lane.begin_ns, end = to - lane.begin_ns;
    for (let at = spanAfter(lane, start, block.length_ns, begin); at < lane.first + lane.count && start[at] < end; at++)
      found[block.kind[at]] += Math.max(0, Math.min(end, start[at] + block.length_ns[at]) - Math.max(begin, start[at]));
  }
  return found;
}
