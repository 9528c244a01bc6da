// Draws every figure with Vega, and offers its data; vl-convert bundles this with the library.
const specs = JSON.parse(document.getElementById("figures").textContent);
const quoted = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

function csv({ concat, usermeta: { mark, columns } }) {
  const rows = concat.flatMap((panel) => panel.data.values).filter((row) => "panel" in row);
  const lines = rows.map((row) => columns.map((name) => quoted(String(row[name] ?? ""))));
  return [...(mark ? [`# ${mark}`] : []), columns.join(), ...lines.map((line) => line.join())].join("\n") + "\n";
}

const page = document.documentElement.clientWidth;

// On a phone: panels below one another and as wide as the page, with fewer ticks and legends below.
// Matrices and arrows keep their proportions.
function fitted(spec) {
  if (page >= 700) return spec;
  const { concat, ...rest } = JSON.parse(
    JSON.stringify(spec).replaceAll('"orient":"right"', '"orient":"bottom"').replaceAll('"tickCount":8', '"tickCount":4'));
  const kept = (panel) => panel.width === panel.height || panel.encoding.x?.axis === null;
  const narrower = (panel) =>
    kept(panel) ? panel : { ...panel, width: Math.min(panel.width, page - 150) };
  return { ...rest, columns: 1, concat: concat.map(narrower) };
}

for (const card of document.querySelectorAll("[data-figure]")) {
  const name = card.dataset.figure;
  vegaEmbed(card.querySelector(".canvas"), fitted(specs[name]), {
    mode: "vega-lite",
    ast: true, // without eval, which the page's policy forbids
    renderer: "svg",
    downloadFileName: name,
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  const data = new Blob([csv(specs[name])], { type: "text/csv;charset=utf-8" });
  card.querySelector("figcaption a").href = URL.createObjectURL(data);
}
