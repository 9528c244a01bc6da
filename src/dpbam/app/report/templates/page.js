// The page: draws every figure at its width, and gives it a toolbar; sorts tables; changes theme.
const HEIGHTS = {
  lines: (panel, width) => (width < 400 ? 250 : 290) + (panel.title ? 18 : 0),
  dots: dotsHeight,
  matrix: matrixHeight,
  arrows: (panel, width, bounds) => arrowsHeight(panel, width, bounds),
};
const DRAW = { lines: drawLines, dots: drawDots, matrix: drawMatrix, arrows: drawArrows };
const GAP = 36;
const PRINTED = 660; // pixels of a wide figure on an A4 or letter sheet

/** One SVG with all panels of a figure, in as many columns as fit. */
function drawFigure(spec, width, zoom = null, id = spec.name, tall = 1) {
  const kind = spec.panels[0].kind;
  const least = kind === "lines" ? 300 : kind === "dots" ? 320 : 280;
  const fitting = Math.max(1, Math.floor((width + GAP) / (least + GAP)));
  const most = kind === "lines" ? 3 : kind === "matrix" && !spec.panels[0].square ? 2 : 4;
  const rows = Math.ceil(spec.panels.length / Math.min(fitting, most));
  const columns = Math.ceil(spec.panels.length / rows); // rows of equal length
  const each = (width - GAP * (columns - 1)) / columns;
  const all = kind === "arrows" ? union(spec.panels.map((p) => p.bounds)) : null;
  const frameOf = (p) => (all && columns === 1 ? [all[0], p.bounds[1], all[2], p.bounds[3]] : all);
  const together = kind === "lines" && spec.same_scale ? spec.panels : null;
  const svg = node("svg", { role: "img", "aria-label": describe(spec), width, xmlns: SVG });
  svg.frames = [];
  let y = 4;
  for (let start = 0; start < spec.panels.length; start += columns) {
    const row = spec.panels.slice(start, start + columns);
    const height = tall * Math.max(...row.map((panel) => HEIGHTS[kind](panel, each, frameOf(panel))));
    row.forEach((panel, i) => {
      const index = start + i;
      const at = i * (each + GAP);
      const options = { window: zoom, together, bounds: frameOf(panel), id: `${id}-${index}` };
      const group = DRAW[kind](panel, each, height, options);
      group.setAttribute("transform", `translate(${at},${y})`);
      svg.append(group);
      if (group.frame) svg.frames.push({ panel, frame: group.frame, at, y, group });
    });
    y += height + 18;
  }
  const total = y - 18;
  svg.setAttribute("height", total);
  svg.setAttribute("viewBox", `0 0 ${width} ${total}`);
  return svg;
}

function union(all) {
  return [0, 1, 2, 3].map((i) => (i < 2 ? Math.min : Math.max)(...all.map((b) => b[i])));
}

function describe(spec) {
  const parts = spec.panels.map((panel) => {
    if (panel.kind !== "lines") return panel.title;
    return panel.series.filter((s) => s.label && finite(s.y).length)
      .map((s) => `${s.label} ends at ${say(finite(s.y).at(-1), panel.percent)}`).join(", ");
  });
  return [spec.title, ...parts, spec.mark].filter(Boolean).join(". ");
}

/** One figure on the page. */
class FigureView {
  constructor(host, spec) {
    Object.assign(this, { host, spec, zoom: null });
    this.canvas = host.querySelector(".canvas");
    this.reset = host.querySelector("[data-do=resetZoom]");
    for (const button of host.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => this[button.dataset.do](button));
    }
    this.draw();
  }

  draw(width = Math.floor(this.canvas.clientWidth)) {
    if (!width) return;
    const svg = drawFigure(this.spec, width, this.zoom);
    this.canvas.replaceChildren(svg);
    interact(svg, (window) => this.show(window));
  }

  show(window) {
    this.zoom = window;
    if (this.reset) this.reset.hidden = !window;
    this.draw();
  }

  resetZoom() { this.show(null); }

  svg() { saveText(exported(this.canvas.firstChild, this.spec.mark), `${this.spec.name}.svg`, "image/svg+xml"); }

  png() { savePicture(this.canvas.firstChild, this.spec.mark, `${this.spec.name}.png`); }

  csv() { saveText(toCsv(this.spec), `${this.spec.name}.csv`, "text/csv"); }

  enlarge() {
    const dialog = document.getElementById("enlarged");
    dialog.querySelector("h2").textContent = this.spec.title;
    dialog.querySelector(".badge").textContent = this.spec.mark;
    dialog.showModal();
    const room = dialog.querySelector(".canvas");
    const tall = this.spec.panels[0].kind === "lines" ? 1.6 : 1;
    const paint = (zoom) => {
      const svg = drawFigure(this.spec, room.clientWidth, zoom, `${this.spec.name}-large`, tall);
      room.replaceChildren(svg);
      interact(svg, paint);
    };
    paint(this.zoom);
  }
}

/** Values under the pointer; with a mouse, drag along x to zoom in, double click to zoom out. */
function interact(svg, zoomTo) {
  for (const { panel, frame, at, y, group } of svg.frames) {
    const box = node("rect", {
      x: frame.left, y: frame.top, class: "catch",
      width: Math.max(0, frame.right - frame.left), height: frame.bottom - frame.top,
    });
    const hair = node("line", { y1: frame.top, y2: frame.bottom, class: "hair", visibility: "hidden" });
    const brush = node("rect", { y: frame.top, height: frame.bottom - frame.top, class: "brush", width: 0 });
    group.append(brush, hair, box);
    const local = (event) => event.clientX - svg.getBoundingClientRect().left - at;
    let from = null;
    box.addEventListener("pointermove", (event) => {
      const p = Math.min(frame.right, Math.max(frame.left, local(event)));
      if (from !== null) {
        brush.setAttribute("x", Math.min(from, p));
        brush.setAttribute("width", Math.abs(p - from));
      }
      hair.setAttribute("visibility", "visible");
      hair.setAttribute("x1", p);
      hair.setAttribute("x2", p);
      tip(event, readings(panel, frame.x.invert(p)));
    });
    box.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); tip(null); });
    box.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return;
      from = local(event);
      box.setPointerCapture(event.pointerId);
    });
    box.addEventListener("pointerup", (event) => {
      const [start, p] = [from, local(event)];
      from = null;
      brush.setAttribute("width", 0);
      if (start !== null && Math.abs(p - start) > 8) {
        tip(null);
        zoomTo([start, p].map(frame.x.invert).sort((a, b) => a - b));
      }
    });
    box.addEventListener("dblclick", () => zoomTo(null));
  }
  svg.addEventListener("pointermove", (event) => {
    const text = event.target.dataset?.tip;
    if (text) tip(event, [[null, text]]);
    else if (!event.target.classList.contains("catch")) tip(null);
  });
  svg.addEventListener("pointerleave", () => tip(null));
}

/** What to show at x: the nearest point of every curve. */
function readings(panel, x) {
  const lines = [[null, `${panel.x_label} ${say(x)}`]];
  for (const s of panel.series) {
    if (!s.label || !s.y.length || s.style === "faint") continue;
    let best = 0;
    s.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(s.x[best] - x)) best = i; });
    lines.push([s.colour, `${s.label}: ${say(s.y[best], panel.percent)}`]);
  }
  return lines;
}

function tip(event, lines) {
  const box = document.getElementById("tip");
  box.hidden = !event;
  if (!event) return;
  (document.querySelector("dialog[open]") || document.body).append(box); // a dialog covers the page
  box.replaceChildren(...lines.map(([colour, text]) => {
    const line = document.createElement("div");
    if (colour !== null) {
      const swatch = document.createElement("span");
      swatch.className = `swatch c${colour}`;
      line.append(swatch);
    }
    line.append(text);
    return line;
  }));
  const { offsetWidth: w, offsetHeight: h } = box;
  box.style.left = `${Math.max(8, Math.min(innerWidth - w - 8, event.clientX + 14))}px`;
  box.style.top = `${event.clientY + h + 24 > innerHeight ? event.clientY - h - 12 : event.clientY + 16}px`;
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b), falling));
      table.tBodies[0].append(...rows);
    });
  });
}

/** Numbers by size, text by alphabet, what is missing always last. */
function compare(a, b, falling) {
  if (!a || !b) return a ? -1 : b ? 1 : 0;
  const [x, y] = [Number(a), Number(b)];
  const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  return falling ? -order : order;
}

function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function start() {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const views = [];
  for (const host of document.querySelectorAll("[data-figure]")) {
    views.push(new FigureView(host, figures[host.dataset.figure]));
  }
  let last = innerWidth;
  const redraw = () => views.forEach((view) => view.draw());
  addEventListener("resize", () => { if (innerWidth !== last) { last = innerWidth; redraw(); } });
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
    views.forEach((view) => view.draw(view.host.classList.contains("wide") ? PRINTED : (PRINTED - 60) / 2));
  });
  addEventListener("afterprint", redraw);
  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", redraw));
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = currentTheme() === "dark" ? "light" : "dark";
  });
  document.querySelectorAll("[data-widget=clipping]").forEach((host) => new ClippingWidget(host));
}
document.addEventListener("DOMContentLoaded", start);
