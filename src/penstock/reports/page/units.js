// Numbers with the unit that suits them; penstock.reports.units says the same in Python.

const digits = (value) => {
  const rounded = Number(value.toPrecision(3));
  return rounded === 0 ? "0" : rounded.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded)))));
};
const grouped = (value, places = 0) => value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });

function time(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0) return "-" + time(-seconds);
  for (const [unit, scale] of [["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3], ["s", 1]])
    if (Number((seconds / scale).toPrecision(3)) < (unit === "s" ? 120 : 1000)) return `${digits(seconds / scale)} ${unit}`;
  const two = (number) => String(number).padStart(2, "0");
  const whole = Math.round(seconds), minutes = Math.round(seconds / 60), hours = Math.round(seconds / 3600);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${two(hours % 24)} h`;
}

function bytes(size) {
  if (Math.abs(size) < 1024) return `${size.toFixed(0)} B`;
  let unit = "";
  for (unit of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    size /= 1024;
    if (Math.abs(size) < 1023.95) break;
  }
  return `${size.toFixed(1)} ${unit}`;
}

function count(number) {
  if (Math.abs(number) < 10000) return grouped(number);
  let last = ["", 1];
  for (last of [["k", 1e3], ["M", 1e6], ["B", 1e9], ["T", 1e12]]) if (Number((Math.abs(number) / last[1]).toPrecision(3)) < 1000) break;
  return `${digits(number / last[1])} ${last[0]}`;
}

function usd(amount) {
  if (amount < 0) return "-" + usd(-amount);
  if (amount > 0 && amount < 0.1) return `$${digits(amount)}`;
  return amount < 999.995 ? `$${grouped(amount, 2)}` : `$${grouped(amount)}`;
}

/** Four digits, as Python's format `.4g` has them. */
const real = (value) => (Math.abs(value) >= 1e-4 ? Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 9 })
  : value.toExponential(3).replace(/\.?0+e/, "e").replace(/e([+-])(\d)$/, "e$10$2"));

const FORMATS = {
  time, bytes, count, usd,
  share: (value) => `${(100 * value).toFixed(1)}%`,
  number: (value) => (Math.abs(value) < 1000 && !Number.isInteger(value) ? real(value) : grouped(value)),
};

/** A number with what it counts, as `penstock.errors.plural` words it. */
export function plural(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A value of a table as text; what is no number is told, never drawn as zero. */
export function shown(value, unit) {
  if (value === null || value === undefined || value === "") return "-";
  if (typeof value !== "number" || unit === "text") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "infinite" : "-infinite";
  return FORMATS[unit](value);
}
