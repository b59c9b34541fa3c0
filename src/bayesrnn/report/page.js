"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;
const onSwitch = (name, act) => all(`[data-switch="${name}"] input`).forEach((input) => input.addEventListener("change", act));

// --- charts ---------------------------------------------------------------------------------------

// Figures name the page's colours, var(--name); plotly wants them as they are under the theme.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
function colour(name) {
  probe.style.color = name;
  return getComputedStyle(probe).color;
}
function coloured(value) {
  if (typeof value === "string") return value.startsWith("var(--") ? colour(value) : value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
  }
  return value;
}

const config = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };
function draw(plot) {
  const figure = data.figures[plot.dataset.figure];
  const map = plot.classList.contains("map");
  const { layout, data: traces } = coloured({ layout: figure.layout, data: figure.data });
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: map || !matchMedia("(pointer: fine)").matches ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("var(--muted)") },
    hoverlabel: { bgcolor: colour("var(--card)"), bordercolor: colour("var(--line)"), font: { color: colour("var(--ink)") } },
  });
  if (layout.legend) layout.legend.font = { ...layout.legend.font, color: colour("var(--ink)") };
  if (map) {
    plot.style.aspectRatio = plot.dataset.shape.split(" / ").reverse().join(" / ");
    const view = chosen("view");
    const cut = (2 * Number(document.querySelector('input[name="fraction"]').value) + 0.5) / 200.5;
    const [gone, left] = [colour("var(--gone)"), colour("var(--left)")];
    for (const trace of traces) {
      trace.visible = traces.length === 1 || trace.name === view;
      if (trace.name === "pruned_at") {
        trace.zmin = 0;
        trace.zmax = 200.5;
        trace.colorscale = [[0, gone], [Math.min(cut, 1), gone], [Math.min(cut, 1), left], [1, left]];
      }
    }
  }
  const { spread, run } = plot.closest("[data-fans]")?.dataset ?? {};
  for (const trace of traces) if (trace.meta) trace.visible = trace.meta[0] === spread && trace.meta[1] === Number(run);
  return Plotly.react(plot, traces, layout, { ...config, staticPlot: map });
}
const visible = (plot) => plot.offsetParent !== null;
const redraw = (plots) => Promise.all(plots.filter(visible).map(draw));

async function begin() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  await document.fonts.ready;
  await redraw(all(".plot"));
  document.documentElement.dataset.ready = "yes";
}

// --- theme ----------------------------------------------------------------------------------------

const remembered = { get: () => { try { return localStorage.getItem("bayesrnn-theme"); } catch { return null; } },
  set: (theme) => { try { localStorage.setItem("bayesrnn-theme", theme); } catch { /* a page from disk may not */ } } };
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.querySelector(`input[name="theme"][value="${theme}"]`).checked = true;
}
if (["light", "dark"].includes(remembered.get())) setTheme(remembered.get());
onSwitch("theme", () => { setTheme(chosen("theme")); remembered.set(chosen("theme")); redraw(all(".plot")); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(all(".plot")));

// --- shaded words ---------------------------------------------------------------------------------

const percent = (p) => (p >= 0.1 ? Math.round(100 * p) : p >= 0.001 ? (100 * p).toFixed(1) : "<\u00a00.1") + "\u00a0%";
const figuresOf = (word) => data.passages[word.closest("[data-words]").dataset.words][word.dataset.i];
const choosable = (page) => all('.w[role="button"]', page);

// A text, or the captions: words to shade and to choose from, and what is told of the one chosen.
function openReading(reading) {
  const group = reading.dataset.reading;
  const end = reading.dataset.end;
  const spoken = (word) => (word === "<unk>" ? "unknown word" : word === "<eos>" || word === "\n" ? end : word === " " ? "␣ blank" : word);

  function shade() {
    const measure = chosen(`measure-${group}`);
    const [low, high] = data.scales[group][measure];
    reading.dataset.measure = measure;
    reading.querySelector(".scale-low").textContent = `${low.toFixed(2)} nats`;
    reading.querySelector(".scale-high").textContent = `${high.toFixed(2)} nats`;
    for (const word of all(".w", reading)) {
      const figures = figuresOf(word);
      word.style.setProperty("--u", figures && high > low ? Math.max(0, Math.min((figures[measure] - low) / (high - low), 1)).toFixed(3) : 0);
    }
  }

  function choose(word) {
    const figures = figuresOf(word);
    if (!figures) return;
    const page = word.closest(".page");
    all(".chosen-word", page).forEach((other) => { other.classList.remove("chosen-word"); other.tabIndex = -1; });
    word.classList.add("chosen-word");
    word.tabIndex = 0;
    const text = word.classList.contains("mark") ? end : spoken(word.textContent);
    const unknown = word.classList.contains("unknown");
    reading.querySelector(".chosen").textContent = text;
    reading.querySelector(".came").textContent = `came with probability ${percent(figures.probability)}`;
    for (const part of all(".parts div", reading)) part.querySelector("dd").textContent = figures[part.className].toFixed(3);
    const list = reading.querySelector(".top-words");
    list.replaceChildren(...figures.top.map(([word_, p]) => {
      const line = document.createElement("li");
      const name = document.createElement("span");
      const value = document.createElement("b");
      name.textContent = spoken(word_);
      value.textContent = percent(p);
      line.style.setProperty("--p", p);
      line.classList.toggle("hit", unknown ? word_ === "<unk>" : spoken(word_) === text);
      line.append(name, value);
      return line;
    }));
  }

  function showPage(run) {
    for (const page of all(".page", reading)) page.hidden = page.dataset.run !== run;
    const page = reading.querySelector(".page:not([hidden])");
    const before = page.querySelector(".chosen-word");
    const near = page.querySelector(".pictures > li") ?? page; // to be seen beside what is told of it
    choose(before ?? choosable(near).reduce((best, word) => (figuresOf(word).epistemic > figuresOf(best).epistemic
      || (figuresOf(best).epistemic === 0 && figuresOf(word).total > figuresOf(best).total) ? word : best)));
  }

  for (const page of all(".page", reading)) {
    const listen = (kind, act) => page.addEventListener(kind, (event) => { const word = event.target.closest('.w[role="button"]'); if (word) act(word); });
    listen("pointerover", choose);
    listen("click", choose);
    listen("focusin", choose);
    page.addEventListener("keydown", walk);
  }
  onSwitch(`measure-${group}`, shade);
  onSwitch("passage", () => { if (group === "text") showPage(chosen("passage")); });
  shade();
  showPage(reading.querySelector(".page:not([hidden])").dataset.run);
}

function walk(event) {
  const words = choosable(event.currentTarget);
  const at = words.indexOf(event.target.closest(".w"));
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: words.length - 1 }[event.key] ?? upOrDown(words, at, event.key);
  if (to === undefined || at < 0) return;
  event.preventDefault();
  words[Math.max(0, Math.min(to, words.length - 1))].focus();
}
function upOrDown(words, at, key) {
  if (at < 0 || !["ArrowUp", "ArrowDown"].includes(key)) return undefined;
  const step = key === "ArrowDown" ? 1 : -1;
  const here = words[at].getBoundingClientRect();
  let best, nearest = Infinity, line;
  for (let i = at + step; i >= 0 && i < words.length; i += step) {
    const box = words[i].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 8) break;
    const away = Math.abs(box.left - here.left);
    if (away < nearest) [best, nearest] = [i, away];
  }
  return best;
}
all(".reading").forEach(openReading);

// --- forecasts ------------------------------------------------------------------------------------

all("[data-fans]").forEach((fans, number) => {
  onSwitch(`spread-${number}`, (event) => { fans.dataset.spread = event.target.value; redraw(all(".plot", fans)); });
  onSwitch(`fan-${number}`, (event) => {
    fans.dataset.run = event.target.value;
    fans.style.setProperty("--shown", event.target.parentElement.querySelector(".dot").style.background);
    redraw(all(".plot", fans));
  });
});

// --- the maps -------------------------------------------------------------------------------------

const weights = document.getElementById("weights");
const maps = all(".plot.map");
function showMaps() {
  const run = chosen("maps");
  if (run !== undefined) for (const each of all(".maps")) each.hidden = each.dataset.run !== run;
  weights.dataset.view = chosen("view") ?? "pruned_at";
  const fraction = document.querySelector('input[name="fraction"]');
  if (!fraction) return;
  document.querySelector(".slider output").textContent = `${fraction.value} %`;
  const left = Object.fromEntries(data.maps.map((gate) => [gate.key, gate.left[fraction.value]]));
  for (const plot of maps) {
    plot.nextElementSibling.querySelector("output").textContent = left[plot.dataset.figure] ? percent(left[plot.dataset.figure]) : "0\u00a0%";
  }
}
const showAndDraw = () => { showMaps(); redraw(maps); };
onSwitch("maps", showAndDraw);
onSwitch("view", showAndDraw);
document.querySelector('input[name="fraction"]')?.addEventListener("input", () => {
  const view = document.querySelector('input[name="view"][value="pruned_at"]');
  if (view) view.checked = true;
  showMaps();
  cancelAnimationFrame(showAndDraw.frame);
  showAndDraw.frame = requestAnimationFrame(() => redraw(maps));
});
showMaps();
begin();
