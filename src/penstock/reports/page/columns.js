// Arrays of the page: planes of bytes, compressed, in base64; see penstock.reports.columns.

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), found = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) found[at] = letters.charCodeAt(at);
  return found;
}

/** The array that a text holds: Uint8Array where numbers are small, Float32Array of real numbers, else Float64Array. */
export async function unpack({ n, form, width }, text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (form === "u" && width === 1) return planes;
  if (form === "f") {
    const whole = new Uint8Array(4 * n);
    for (let plane = 0; plane < 4; plane++) for (let at = 0; at < n; at++) whole[4 * at + plane] = planes[plane * n + at];
    return new Float32Array(whole.buffer);
  }
  const found = new Float64Array(n);
  for (let plane = width - 1; plane >= 0; plane--) {
    const from = plane * n;
    for (let at = 0; at < n; at++) found[at] = found[at] * 256 + planes[from + at];
  }
  if (form === "z") for (let at = 0; at < n; at++) found[at] = found[at] % 2 ? -(found[at] + 1) / 2 : found[at] / 2;
  return found;
}

/** Every {column: number} of a value replaced by its array. */
export function withColumns(value, arrays) {
  if (Array.isArray(value)) return value.map((one) => withColumns(one, arrays));
  if (value === null || typeof value !== "object") return value;
  if ("column" in value) return arrays[value.column];
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, withColumns(one, arrays)]));
}
