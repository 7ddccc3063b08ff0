
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const palettes = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#6b7280", "#7a3fb0", "#a3a9b4"],
  dark: ["#4ba3e3", "#f0b93a", "#2cc295", "#e29bc4", "#f0803c", "#8fd0f5", "#d6c64a", "#9aa3b2", "#b58be0", "#5b6472"],
};
const count = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
/** Ticks of a logarithmic axis, as many as have room: digits times powers of ten. Plotly would name 5,000 "5". */
function ticks(traces, name, room) {
  const values = traces.flatMap((trace) => trace[name] ?? []).filter((one) => one > 0);
  const least = Math.min(...values) * 0.999, most = Math.max(...values) * 1.001;
  const tens = [...Array(25).keys()].map((power) => 10 ** (power - 9));
  const within = (digits) => tens.flatMap((ten) => digits.map((one) => one * ten)).filter((one) => one >= least && one <= most);
  const found = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1]].map(within).find((all) => all.length <= room) ?? [];
  return found.length < 3 ? { tickformat: ",.6~f", nticks: room } : { tickvals: found, ticktext: found.map((one) => count.format(one)) };
}
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
    const width = document.getElementById("chart-" + at).clientWidth;
    const room = { x: Math.max(3, Math.floor(width / 80)), y: 9 };
    const named = (axis, name) => ({
      ...(axis.type === "log" ? ticks(chart.traces, name, room[name]) : {}), ...axis,
      ...(axis.title === undefined ? {} : { title: { text: axis.title, standoff: 6 } }),
    });
    const layout = {
      margin: { l: 56, r: 12, t: 8, b: 44 }, hovermode: "x unified", ...asked,
      paper_bgcolor: of("--card"), plot_bgcolor: of("--card"), font: { color: of("--text"), size: 12 },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", ...asked.legend },
      hoverlabel: { bgcolor: of("--back"), font: { color: of("--text") } },
      xaxis: { ...axis, ...named(asked.xaxis ?? {}, "x") },
      yaxis: { ...axis, rangemode: "tozero", ...named(asked.yaxis ?? {}, "y") },
    };
    Plotly.react("chart-" + at, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  });
}
draw();
dark.addEventListener("change", draw);
