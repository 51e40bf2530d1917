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
      title: { standoff: 8 }, ticks: "outside", ticklen: 4 };
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
      modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"],
      toImageButtonOptions: { format: "svg", filename: element.getAttribute("aria-label").slice(0, 60).replace(/\W+/g, "-") } };
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

  function drawAll(root) {
    const plots = [...root.querySelectorAll(".plot:not(.drawn)")];
    for (const element of plots) seen.observe(element);
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
  return { drawAll, redraw };
})();
