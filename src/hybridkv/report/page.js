
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const palettes = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#6b7280", "#7a3fb0", "#a3a9b4"],
  dark: ["#4ba3e3", "#f0b93a", "#2cc295", "#e29bc4", "#f0803c", "#8fd0f5", "#d6c64a", "#9aa3b2", "#b58be0", "#5b6472"],
};
function draw() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const colours = palettes[dark.matches ? "dark" : "light"];
  charts.forEach((chart, at) => {
    const traces = chart.traces.map((trace) => {
      const { colour, ...rest } = trace;
      if (colour === undefined) return rest;
      const with_ = colours[colour % colours.length];
      const filled = rest.stackgroup === undefined ? {} : { fillcolor: with_ };
      return { ...rest, ...filled, marker: { color: with_, ...rest.marker }, line: { color: with_, ...rest.line } };
    });
    const axis = { gridcolor: of("--line"), linecolor: of("--line"), zerolinecolor: of("--line"), automargin: true };
    const asked = chart.layout;
    const named = (axis) => ({ ...axis, ...(axis.title === undefined ? {} : { title: { text: axis.title } }) });
    const layout = {
      margin: { l: 56, r: 12, t: 8, b: 44 }, hovermode: "x unified", ...asked,
      paper_bgcolor: of("--card"), plot_bgcolor: of("--card"), font: { color: of("--text"), size: 12 },
      legend: { orientation: "h", y: -0.22, ...asked.legend },
      hoverlabel: { bgcolor: of("--back"), font: { color: of("--text") } },
      xaxis: { ...axis, ...named(asked.xaxis ?? {}) },
      yaxis: { ...axis, rangemode: "tozero", ...named(asked.yaxis ?? {}) },
    };
    Plotly.react("chart-" + at, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  });
}
draw();
dark.addEventListener("change", draw);
