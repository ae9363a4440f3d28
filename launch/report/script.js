// Draws the page from the JSON in #data; launch/report/page.py and charts.py say what is in it.
const data = JSON.parse(document.getElementById("data").textContent);
const WIDTH = 400, HEIGHT = 210, TOP = 8, BOTTOM = 24, RIGHT = 14;  // of a chart, in units of its viewBox
const CHARACTER = 7.2;  // width of a character of an axis label
const COLORS = 6;  // in style.css
const SVG = ["svg", "path", "text", "circle", "rect", "title"];

// Return an element. Children are elements or text, so that no text is taken for HTML.
function make(tag, attributes, ...children) {
  const node = SVG.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const box = (name, ...children) => make("div", {class: name}, ...children);
const colored = number => `color:var(--p${number})`;

// Return evenly spaced round numbers, the first at most `low` and the last at least `high`.
function ticks(low, high, count) {
  if (low === high && low === 0) high = 1;
  else if (high - low <= 1e-5 * Math.max(Math.abs(low), Math.abs(high))) {
    // Values are constant up to the rounding of float32: widen the range, so that labels differ.
    const spread = Math.abs(high) || 1;
    low -= spread / 2; high += spread / 2;
  }
  const rough = (high - low) / count, base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * base).find(step => step >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
}

function number(value, percent, digits = 4) {
  if (percent) return number(100 * value, false, digits) + "%";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e12) return String(+value.toPrecision(digits));
  const notation = size < 1e4 ? "standard" : "compact";
  return value.toLocaleString("en", {notation, maximumSignificantDigits: digits, useGrouping: false});
}

// A chart of series that have either a line or boxes; launch/report/charts.py describes both.
function chart({title, hint = "", series, span, x: labels, percent = false, zero = true, reference = null}) {
  const levels = series.flatMap(({low, high, boxes}) => boxes ? boxes.map(box => box[3]) : [low, high]);
  if (zero) levels.push(0);
  if (reference !== null) levels.push(reference);
  const yTicks = ticks(Math.min(...levels), Math.max(...levels), 5), low = yTicks[0], high = yTicks.at(-1);
  const first = span[0], last = Math.max(span[1], first + 1);
  const fits = value => value - first > (last - first) / 10 && value <= last && Number.isInteger(value);
  let xTicks = [first, ...ticks(first, last, 4).filter(fits)];
  if (xTicks.length < 2) xTicks = [first, last];
  labels ??= xTicks.map(value => [value, number(value, false, 7)]);

  const yLabels = yTicks.map(value => number(value, percent, 7).replaceAll("-", "\u2212"));
  const left = 10 + CHARACTER * Math.max(...yLabels.map(label => label.length)), right = WIDTH - RIGHT;
  const x = value => left + (value - first) / (last - first) * (right - left);
  const y = value => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP);
  const level = (value, name) => make("path", {class: name, d: `M${left} ${y(value)}H${right}`});
  const point = ([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
  const stroke = (name, {color, dashed}, strokes) => make("path", {
    class: name + (dashed ? " dashed" : ""), style: colored(color),
    d: strokes.map(points => "M" + points.map(point).join("L")).join(""),
  });

  const svg = make("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  yTicks.forEach((value, i) =>
    svg.append(level(value, "grid"), make("text", {class: "tick end", x: left - 6, y: y(value) + 3.5}, yLabels[i])));
  for (const [value, label] of labels) {
    const inside = Math.min(x(value), WIDTH - CHARACTER * label.length / 2);
    svg.append(make("text", {class: "tick middle", x: inside, y: HEIGHT - 7}, label));
  }
  // A nested image clips outliers to the area of the plot.
  const plot = svg.appendChild(make("svg", {width: WIDTH, height: HEIGHT - BOTTOM + 3}));
  if (reference !== null) plot.append(level(reference, "reference"));
  for (const each of series) if (each.line && !each.dashed) plot.append(stroke("faint", each, each.faint));
  for (const {color, dashed, line, faint, boxes} of series) {
    const style = colored(color);
    for (const [x0, x1, y0, y1, text] of boxes ?? []) {
      const place = {x: x(x0), y: y(y1), width: x(x1) - x(x0), height: y(y0) - y(y1)};
      plot.append(make("rect", {style, ...place}, make("title", {}, text)));
    }
    if (!line) continue;
    plot.append(stroke("line", {color, dashed}, line));
    if (!faint.length) for (const [step, value] of line.flat())
      plot.append(make("circle", {style, cx: x(step), cy: y(value), r: 2.4}));
  }

  const legend = series.map(({label, value, color, dashed, line}) => make("span", {},
    make("i", {style: colored(color), class: dashed ? "dashed" : ""}), label, " ",
    make("b", {}, value ?? number(line.at(-1).at(-1)[1], percent))));
  const caption = make("figcaption", {}, title, make("small", {}, hint));
  const figure = make("figure", {class: "chart"}, caption, box("legend", ...legend), svg);
  if (series[0].line) followPointer(figure, svg, series, percent, x);
  return figure;
}

// A chart of metrics over all steps. When the colors run out, they repeat with dashed lines.
function lineChart({dashed = [], ...options}, lines) {
  const series = lines.map(([metric, label], i) =>
    ({...data.metrics[metric], label, color: i % COLORS + 1, dashed: i >= COLORS || dashed.includes(label)}));
  const first = Math.min(data.span[0], ...series.map(({line}) => line[0][0][0]));
  return chart({...options, series, span: [first, data.span[1]]});
}

// Show the values at the step that is nearest to the pointer.
function followPointer(figure, svg, series, percent, x) {
  const tip = figure.appendChild(box("tip")), cursor = svg.appendChild(make("path", {class: "cursor"}));
  const lines = series.map(({line}) => line.flat());
  const leave = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
  const move = event => {
    const inside = svg.getBoundingClientRect(), outside = figure.getBoundingClientRect(), scale = inside.width / WIDTH;
    const distance = point => Math.abs(x(point[0]) - (event.clientX - inside.left) / scale);
    const nearest = points => points.reduce((a, b) => distance(b) < distance(a) ? b : a);
    const near = lines.map(nearest), [step] = nearest(near);
    cursor.setAttribute("d", `M${x(step)} ${TOP}V${HEIGHT - BOTTOM}`);
    tip.replaceChildren(`step ${step}`);
    near.forEach((point, i) => {
      if (Math.abs(x(point[0]) - x(step)) <= 6) tip.append(make("br", {}), `${series[i].label} ${number(point[1], percent)}`);
    });
    tip.hidden = false;
    const at = inside.left - outside.left + x(step) * scale, space = 12;
    const beyond = at + space + tip.offsetWidth > outside.width;
    tip.style.left = `${Math.max(0, beyond ? at - space - tip.offsetWidth : at + space)}px`;
    tip.style.top = `${inside.top - outside.top + 6}px`;
  };
  leave();
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, move);
  svg.addEventListener("pointerleave", leave);
}

// A completion, each token shaded by its writer. Line breaks get a visible sign, so that their shade can be seen.
function completion({prompt, facts, head, hidden, tail, stopped}) {
  const token = ([text, writer]) => make("span", {class: `w${writer ?? 0}`}, text.replaceAll("\n", "\u21b5\n"));
  const shaded = box("text", ...head.map(token));
  if (hidden) shaded.append(make("p", {class: "soft"}, `\u2026 ${hidden} tokens \u2026`), ...tail.map(token));
  const last = [...head, ...tail].at(-1);
  if (stopped && last) shaded.append(make("span", {class: `end w${last[1] ?? 0}`}, "stop"));
  return box("sample", box("text prompt", prompt), shaded, box("facts", ...facts.map(fact => make("span", {}, fact))));
}

const fold = (title, about, ...body) =>
  make("details", {}, make("summary", {}, title, make("small", {}, about)), ...body);
const main = document.querySelector("main");
main.replaceChildren(make("h1", {}, data.name), ...data.about.map(line => make("p", {class: "soft"}, line)));
main.append(box("tiles", ...data.figures.map(([value, label]) => box("tile", make("b", {}, value), make("span", {}, label)))));
if (data.warnings.length) {
  const page = section => `${data.docs}/troubleshooting.md${section && "#"}${section}`;
  const link = section => data.docs ? [" ", make("a", {href: page(section)}, "what to do")] : [];
  const lines = data.warnings.map(([line, section]) => make("li", {}, line, ...link(section)));
  main.append(box("warnings", make("b", {}, "Warnings"), " (explained in docs/troubleshooting.md)", make("ul", {}, ...lines)));
}
const steps = data.samples.map(([step, about, completions]) => fold(step, about, box("samples", ...completions.map(completion))));
const writers = data.writers.map(([writer, text]) => make("span", {}, make("i", {class: `w${writer}`}), text));
if (steps.length) main.append(make("h2", {}, "Newest completions"), box("legend", ...writers), steps[0]);
for (const [title, charts] of Object.entries(data.sections)) {
  const drawn = charts.filter(({lines, optional}) => !optional || lines.some(([metric]) => data.metrics[metric].low < 0));
  const figures = drawn.map(({lines, ...rest}) => lineChart(rest, lines));
  if (title === "Time") figures.unshift(...data.stages.map(chart));
  if (figures.length) main.append(make("h2", {}, title), box("charts", ...figures));
}
if (data.lengths.length || steps.length > 1) main.append(make("h2", {}, "Completions"));
main.append(box("charts", ...data.lengths.map(chart)), ...steps.slice(1));
const settings = data.config.map(([name, value]) => box("", make("span", {}, name), make("b", {}, value)));
main.append(make("h2", {}, "Configuration"), fold("config.json", "", box("config", ...settings)));
