"use strict";
(() => {
  const root = document.documentElement, scale = matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];
  root.classList.add("scripted");

  function draw() {
    drawn.forEach((chart) => chart.destroy());
    const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(name).trim();
    const lines = [colour("--blue"), colour("--accent")], axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    drawn = [...document.querySelectorAll("[data-chart]")].map((place) => {
      const data = JSON.parse(place.dataset.chart), days = typeof data.x[0] === "string";
      const x = days ? data.x.map((day) => Date.parse(day) / 1000) : data.x;
      const series = data.series.map((one, i) => ({ label: one.label, stroke: lines[i], fill: lines[i] + "18", width: 2, points: { show: x.length < 40 } }));
      return new uPlot({
        width: place.clientWidth, height: 220, tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
        scales: { x: { time: days }, y: { range: (_, low, high) => [Math.min(0, low), high || 1] } },
        axes: [{ ...axis, values: days ? (_, at) => at.map((one) => new Date(one * 1000).toISOString().slice(5, 10)) : undefined }, axis], series: [{ label: days ? "day" : "round", value: days ? "{YYYY}-{MM}-{DD}" : undefined }, ...series],
      }, [x, ...data.series.map((one) => one.values)], place);
    });
  }

  const notice = document.getElementById("notice");
  document.addEventListener("htmx:error", () => {
    notice.innerHTML = '<p class="alert" role="alert"><strong>The service does not answer.</strong> What you see may be old. The page asks again.</p>';
  });
  document.addEventListener("htmx:after:request", (event) => {
    if (event.detail?.ctx?.response?.status < 400) notice.replaceChildren();
  });
  let width = 0;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; draw(); } });
  scale.addEventListener("change", draw);
  draw();
})();
