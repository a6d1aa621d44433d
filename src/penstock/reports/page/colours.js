// Colours that most eyes tell apart (Okabe and Ito), and the colours of the page as its style has them.

export const STAGES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#707070", "#8a5fbf"];
export const SPANS = {
  forward: "#0072b2", backward: "#009e73", input: "#56b4e9", weight: "#e69f00", update: "#cc79a7", wait: "#c9c9c9", transfer: "#d55e00",
  other: "#8c8c8c",
};

export const stageColour = (index) => STAGES[index % STAGES.length];

/** [red, green, blue] of a colour such as #0072b2. */
export const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** A colour of the style sheet, so that canvases follow light and dark. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888888";
}

/** Black or white, whichever stands out more from a colour: by its luminance, as WCAG has it. */
export function ink(hex) {
  const [red, green, blue] = rgb(hex).map((part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}
