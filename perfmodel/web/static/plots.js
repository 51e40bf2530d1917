// Draws the plots of a page: each `.plot` carries plotly's data and layout; colours of paper and ink are the theme's.
"use strict";

const Plots = (() => {
  const isExported = document.body.classList.contains("exported");  // has no server
  let loading = null;
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "300px" });

  // plotly's script is large: it is asked for when the first plot is, after the first paint.
  function load() {
    loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${isExported ? "" : "/static/vendor/"}plotly-basic.min.js`;
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => { loading = null; reject(new Error("plotly-basic.min.js did not load")); };
      document.head.append(script);
    });
    return loading;
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(layout, isNarrow) {
    const ink = css("--ink"), soft = css("--soft"), line = css("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true,
      title: { standoff: 8, font: { size: isNarrow ? 11 : 13 } }, ticks: "outside", ticklen: 4 };
    const template = { layout: {
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: isNarrow ? 11 : 13, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
      colorway: ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a94a0"],
      margin: { l: 56, r: 16, t: 24, b: 44 }, bargap: 0.35,
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, xanchor: "left", x: 0, traceorder: "normal" },
      hoverlabel: { bgcolor: css("--card"), bordercolor: soft, font: { color: ink } } } };
    const found = { ...layout, template, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    for (const name of Object.keys(found)) {
      if (/^[xy]axis/.test(name)) {
        found[name] = { ...found[name], gridcolor: line, zerolinecolor: line };
        if (found[name].minor) found[name].minor = { ...found[name].minor, gridcolor: line, showgrid: false };
      }
    }
    return found;
  }

  // The house's ink is nearly black; on a dark page it is nearly white.
  function inked(data) {
    const ink = css("--ink");
    return JSON.parse(JSON.stringify(data).replaceAll(/"#(1F2933|1f2933)"/g, JSON.stringify(ink)));
  }

  async function draw(element) {
    let plotly;
    try { plotly = await load(); } catch (error) { element.textContent = "The plot could not be loaded; reload the page."; return; }
    if (element.isConnected) await render(plotly, element);
  }

  // width: in pixels, of paper; else as wide as the page has it.
  function render(plotly, element, width) {
    const figure = JSON.parse(element.dataset.figure);
    const isNarrow = (width ?? element.clientWidth) < 520;
    const layout = themed(figure.layout, isNarrow);
    if (isNarrow && layout.margin) layout.margin = { ...layout.margin, l: Math.min(layout.margin.l ?? 56, 56), r: 8 };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") };
    const config = { displaylogo: false, responsive: true, plotlyServerURL: "",
      modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud", "toImage"] };
    if (width) Object.assign(layout, { width, autosize: false });
    const drawing = plotly.react(element, inked(figure.data), layout, config);
    element.setAttribute("role", "group");  // its buttons are no part of an image
    element.classList.add("drawn");
    element.removeAllListeners("plotly_click");
    element.on("plotly_click", (event) => {
      const query = event.points[0]?.customdata;
      if (typeof query === "string" && !isExported) location.href = "/traffic?" + query;
    });
    return drawing;
  }

  // ---------------------------------------------------------------- a plot as a file

  const KINDS = ["csv", "png", "svg"];

  function addFiles(element) {
    const row = document.createElement("div");
    row.className = "plot-files";
    for (const kind of KINDS) {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", className: "quiet", textContent: kind.toUpperCase() });
      button.dataset.plot = kind;
      button.setAttribute("aria-label", `${kind.toUpperCase()} of the plot: ${element.getAttribute("aria-label")}`);
      row.append(button);
    }
    element.after(row);
  }

  // A row for each point. from: where a bar begins that does not begin at 0; x is then where it ends.
  function csvOf({ data, layout }) {
    const titles = ["xaxis", "yaxis"].map((name) => layout[name]?.title?.text || name[0]);
    const rows = [["series", ...titles, "from", "note"]];
    for (const trace of data) {
      (trace.x ?? []).forEach((x, number) => {
        const of = (values) => (Array.isArray(values) ? values[number] : values) ?? "";
        const from = of(trace.base);
        rows.push([trace.name ?? "", from === "" || x === null ? x : from + x, trace.y[number], from, of(trace.text)]);
      });
    }
    const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? ""));
    return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  }

  function download(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  document.addEventListener("click", async (event) => {
    const kind = event.target.closest?.("[data-plot]")?.dataset.plot;
    if (!kind) return;
    const element = event.target.closest(".plot-files").previousElementSibling, figure = JSON.parse(element.dataset.figure);
    const filename = element.getAttribute("aria-label").slice(0, 60).replace(/\W+/g, "-");
    if (kind === "csv") { download(`${filename}.csv`, new Blob([csvOf(figure)], { type: "text/csv" })); return; }
    const plotly = await load(), size = { width: element.clientWidth, height: element.clientHeight };
    const layout = { ...element.layout, ...size, paper_bgcolor: css("--card") };
    await plotly.downloadImage({ data: element.data, layout }, { format: kind, scale: kind === "png" ? 2 : 1, filename, ...size });
  });

  function drawAll(root) {
    const plots = [...root.querySelectorAll(".plot:not(.drawn)")];
    for (const element of plots) {
      seen.observe(element);
      if (!element.nextElementSibling?.matches(".plot-files")) addFiles(element);
    }
    if (plots.length) window.requestIdleCallback?.(() => load().catch(() => {}));  // for paper, which takes those out of sight, too
  }

  // Paper is light and has a width of its own. Its plots are drawn at once: nobody waits for a script while it prints.
  const PAPER_PIXELS = 700;
  let screenTheme = null;
  addEventListener("beforeprint", () => {
    screenTheme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    if (window.Plotly) for (const element of document.querySelectorAll("#answers .plot")) render(window.Plotly, element, PAPER_PIXELS);
  });
  addEventListener("afterprint", () => {
    document.documentElement.dataset.theme = screenTheme;
    redraw();
  });

  function redraw() {
    for (const element of document.querySelectorAll(".plot.drawn")) draw(element);
  }

  if (isExported) drawAll(document);
  return { download, drawAll, redraw };
})();
