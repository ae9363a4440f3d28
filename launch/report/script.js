for (const figure of document.querySelectorAll(".chart")) {
  const data = figure.querySelector("script"), svg = figure.querySelector("svg");
  if (!data) continue;
  const series = JSON.parse(data.textContent), view = svg.viewBox.baseVal;
  const tip = figure.appendChild(document.createElement("div"));
  const cursor = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  tip.className = "tip"; tip.hidden = true; cursor.setAttribute("class", "cursor");
  const leave = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
  const move = event => {
    const box = svg.getBoundingClientRect(), around = figure.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * view.width;
    const near = series.map(s => s.points.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a));
    const best = near.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a);
    cursor.setAttribute("d", `M${best[1]} 8V${view.height - 24}`);
    tip.replaceChildren(`step ${best[0]}`);
    near.forEach((point, i) => {
      if (Math.abs(point[1] - best[1]) > 6) return;
      tip.appendChild(document.createElement("br"));
      tip.append(`${series[i].label} ${point[2]}`);
    });
    tip.hidden = false;
    const at = box.left - around.left + best[1] / view.width * box.width;
    const right = at + 12 + tip.offsetWidth > around.width;
    tip.style.left = `${Math.max(0, right ? at - 12 - tip.offsetWidth : at + 12)}px`;
    tip.style.top = `${box.top - around.top + 6}px`;
  };
  svg.addEventListener("pointermove", move); svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
}
