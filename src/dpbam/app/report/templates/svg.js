// Small helpers that every drawing uses: SVG nodes, scales, ticks, numbers as text.
const SVG = "http://www.w3.org/2000/svg";
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const pen = document.createElement("canvas").getContext("2d");

function textWidth(text, size = 12, weight = 400) {
  pen.font = `${weight} ${size}px ${FONT}`;
  return pen.measureText(text).width;
}

/** The text, cut with an ellipsis to fit into `width` pixels. */
function fit(text, width, size = 12, weight = 400) {
  if (textWidth(text, size, weight) <= width) return text;
  let cut = text;
  while (cut.length > 1 && textWidth(cut + "…", size, weight) > width) cut = cut.slice(0, -1);
  return cut + "…";
}

/** The text in lines of at most `width` pixels. */
function wrap(text, width, size = 12) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && textWidth(longer, size) > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

function label(text, x, y, kind = "", attributes = {}) {
  return node("text", { x, y, class: `t ${kind}`, ...attributes }, text);
}

/** A number for people: three significant digits, thousands apart, percent where asked. */
function say(value, percent = false) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (percent) return `${trim((value * 100).toFixed(1))}%`;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return trim(value.toExponential(1)).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");
  return trim(value.toPrecision(3));
}

function trim(text) {
  return text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "").replace("-", "−");
}

/** A linear or logarithmic scale from [lo, hi] to [from, to] pixels. */
function scale(lo, hi, from, to, log = false) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(lo), f(hi)];
  const map = (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
  map.invert = (p) => {
    const v = a + ((p - from) / (to - from || 1)) * (b - a);
    return log ? 10 ** v : v;
  };
  map.ticks = (count) => (log ? logTicks(lo, hi, count) : linearTicks(lo, hi, count));
  return map;
}

function linearTicks(lo, hi, count) {
  const rough = (hi - lo) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.75);
  const ticks = [];
  for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi + step * 1e-9; k++) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(lo, hi, count) {
  const decades = Math.log10(hi / lo);
  const steps = decades > 2 ? [1] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const ticks = [];
  for (let p = Math.floor(Math.log10(lo)); p <= Math.ceil(Math.log10(hi)); p++) {
    for (const m of steps) ticks.push(Number((m * 10 ** p).toPrecision(6)));
  }
  const seen = ticks.filter((t) => t >= lo * 0.999 && t <= hi * 1.001);
  const skip = Math.ceil(seen.length / (count + 2));
  return seen.filter((_, i) => i % skip === 0);
}

/** An arrow with a head that keeps its size. */
function arrow(x0, y0, x1, y1, kind, width = 3) {
  const length = Math.hypot(x1 - x0, y1 - y0);
  const group = node("g", { class: `arrow ${kind}` });
  if (length < 0.5) return group;
  const head = Math.min(11, length * 0.6);
  const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
  const [bx, by] = [x1 - ux * head, y1 - uy * head];
  const half = head * 0.42;
  group.append(
    node("line", { x1: x0, y1: y0, x2: bx + ux, y2: by + uy, "stroke-width": width }),
    node("path", {
      class: "head",
      d: `M${x1},${y1}L${bx - uy * half},${by + ux * half}L${bx + uy * half},${by - ux * half}Z`,
    }),
  );
  return group;
}
