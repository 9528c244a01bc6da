// Saving what is on the page: SVG with its styles written into it, PNG at three times the size, CSV.
const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity",
  "stroke-linejoin", "font-family", "font-size", "font-weight", "font-style", "text-anchor", "opacity",
  "paint-order", "visibility"];

/** The drawing as text that stands alone: with its colours, and with the mark that its card has. */
function exported(svg, mark) {
  const copy = svg.cloneNode(true);
  const [from, to] = [[svg, ...svg.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  from.forEach((original, i) => {
    const style = getComputedStyle(original);
    for (const name of KEPT) to[i].style.setProperty(name, style.getPropertyValue(name));
    to[i].removeAttribute("data-tip");
  });
  copy.querySelectorAll(".catch, .hair, .brush").forEach((extra) => extra.remove());
  const [width, height] = [svg.getAttribute("width"), svg.getAttribute("height")].map(Number);
  const [edge, below] = [12, mark ? 24 : 0];
  copy.setAttribute("width", width + 2 * edge);
  copy.setAttribute("height", height + 2 * edge + below);
  copy.setAttribute("viewBox", `${-edge} ${-edge} ${width + 2 * edge} ${height + 2 * edge + below}`);
  if (mark) copy.append(node("text", {
    x: width, y: height + 16, "text-anchor": "end", "font-family": FONT, "font-size": 11,
    "font-weight": 600, fill: getComputedStyle(document.querySelector(".badge.private")).color,
  }, mark));
  const paper = getComputedStyle(svg.closest(".card, dialog") || document.body).backgroundColor;
  copy.prepend(node("rect", { x: -edge, y: -edge, width: "100%", height: "100%", fill: paper }));
  return new XMLSerializer().serializeToString(copy);
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function saveText(text, name, type) {
  save(new Blob([text], { type: `${type};charset=utf-8` }), name);
}

function savePicture(svg, mark, name, times = 3) {
  const picture = new Image();
  const text = exported(svg, mark);
  picture.onload = () => {
    const { width, height } = picture;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width * times, height * times];
    const context = canvas.getContext("2d");
    context.scale(times, times);
    context.drawImage(picture, 0, 0, width, height);
    canvas.toBlob((blob) => save(blob, name), "image/png");
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

function toCsv(spec) {
  const rows = spec.panels.flatMap(csvRows);
  const heads = {
    lines: ["panel", "series", "x", "y", "low", "high"],
    dots: ["panel", "series", "category", "value", "low", "high"],
    matrix: ["panel", "row", "column", "value"],
    arrows: ["panel", "vector", "x_from", "y_from", "x_to", "y_to"],
  };
  const quote = (v) => (/[",\n]/.test(String(v ?? "")) ? `"${String(v).replaceAll('"', '""')}"` : v ?? "");
  const lines = [heads[spec.panels[0].kind], ...rows].map((row) => row.map(quote).join(","));
  return (spec.mark ? `# ${spec.mark}\n` : "") + lines.join("\n") + "\n";
}

function csvRows(panel) {
  if (panel.kind === "lines") {
    return panel.series.flatMap((s) =>
      s.x.map((x, i) => [panel.title, s.label, x, s.y[i], s.low[i], s.high[i]]));
  }
  if (panel.kind === "dots") {
    return panel.series.flatMap((s) =>
      panel.categories.map((c, i) => [panel.title, s.label, c, s.values[i], s.low[i], s.high[i]]));
  }
  if (panel.kind === "matrix") {
    return panel.values.flatMap((row, i) =>
      row.map((value, j) => [panel.title, panel.row_names[i], panel.column_names[j], value]));
  }
  return panel.arrows.filter((a) => !a.again).map((a) => [panel.title, a.role, ...a.start, ...a.end]);
}
