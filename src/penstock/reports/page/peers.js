// Who handed over to an instruction, and to whom it hands over: stages to their neighbours, sends to their receives.

const PASS = { F: [["F", -1], ["F", 1], ["B", 0], ["I", 0]], B: [["B", 1], ["F", 0], ["B", -1]], I: [["I", 1], ["F", 0], ["I", -1]], W: [["I", 0]],
  "→": [["F", 0], ["F", 1]], "←": [["B", 1], ["I", 1], ["B", 0], ["I", 0]] };
/** For each letter which passes may come before or after it, by the difference of their stages; of a transfer the stage is its cut. */
const SENT = /^Send/, RECEIVED = /^Receive/;

/** Whether a span of kind `other`, `apart` stages above, belongs to one of kind `own`. */
function belongs(own, other, apart) {
  if (SENT.test(own.name) || RECEIVED.test(own.name)) return apart === 0 && (SENT.test(own.name) ? RECEIVED : SENT).test(other.name);
  return (PASS[own.letter] ?? []).some(([letter, by]) => letter === other.letter && by === apart);
}

/** The nearest spans before and after one, of its micro-batch, replica and role: { from, to }, each { lane, span } or null. */
export function peers(block, start, lane, span) {
  const { kinds, kind, stage, micro_batch: micro, length_ns: length } = block, own = kinds[kind[span]], found = { from: null, to: null };
  const least = { from: Infinity, to: Infinity }, begin = lane.begin_ns + start[span], end = begin + length[span], role = lane.role === "sends" ? "predicted" : lane.role;
  if (micro[span] < 0) return found;
  const cut = own.letter === "→" || own.letter === "←" || SENT.test(own.name) || RECEIVED.test(own.name);
  for (const other of block.lanes) {
    if (other.role !== role || other.replica !== lane.replica || (cut && other === lane)) continue;
    for (let at = other.first; at < other.first + other.count; at++) {
      if (micro[at] !== micro[span] || (at === span && other === lane) || !belongs(own, kinds[kind[at]], stage[at] - stage[span])) continue;
      const its = other.begin_ns + start[at], way = (its + its + length[at]) / 2 < (begin + end) / 2 ? "from" : "to";
      const apart = way === "from" ? Math.abs(begin - its - length[at]) : Math.abs(its - end);
      if (apart < least[way]) { least[way] = apart; found[way] = { lane: other, span: at }; }
    }
  }
  return found;
}
