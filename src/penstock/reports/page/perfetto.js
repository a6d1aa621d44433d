// Hands a trace to Perfetto, in a window of its own. Only a page that is served may: Perfetto answers nobody who came from a file.

const ASKED_MS = 100, LONGEST_MS = 60000;

/** Opens `address`, waits until it answers, and hands over the bytes; `told` hears how it went. */
export function handOver(address, bytes, title, told) {
  const other = open(address);
  if (!other) { told("the browser opened no window"); return; }
  told(`waiting for ${address}, which needs the network`);
  const ask = setInterval(() => other.postMessage("PING", address), ASKED_MS), end = setTimeout(() => stop(`${address} did not answer`), LONGEST_MS);
  function stop(words) {
    clearInterval(ask);
    clearTimeout(end);
    removeEventListener("message", heard);
    told(words);
  }
  function heard(event) {
    if (event.origin !== address || event.data !== "PONG") return;
    other.postMessage({ perfetto: { buffer: bytes.buffer, title } }, address);
    stop(`handed over to ${address}`);
  }
  addEventListener("message", heard);
}
