// Draws the page's charts, and draws them again where light becomes dark. Loads nothing.
(function () {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const figures = document.getElementById("figures");
  let drawn = false;

  function trouble(message) {
    const place = document.getElementById("trouble");
    place.textContent = message;
    place.hidden = false;
  }

  function kept() {
    // A browser may refuse to keep anything for a file.
    try { return window.localStorage.getItem("paceline-theme"); } catch { return null; }
  }

  function keep(theme) {
    try { window.localStorage.setItem("paceline-theme", theme); } catch { /* then it is chosen again next time */ }
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  }

  function showButton() {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
  }

  // Colours and fonts in figures are names of the style sheet's: var(--series-1).
  function resolved(value, style) {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, style));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, style)]));
    }
    return value;
  }

  function draw() {
    if (!window.Plotly || !figures) return Promise.resolve();
    const style = window.getComputedStyle(root);
    const config = { displayModeBar: false, displaylogo: false, responsive: true, showLink: false };
    const all = Object.entries(JSON.parse(figures.textContent)).map(([id, figure]) => {
      const layout = resolved(figure.layout, style);
      // A finger that drags is to scroll the page.
      if (coarse && !("dragmode" in layout)) layout.dragmode = false;
      return window.Plotly.react(document.getElementById(id), resolved(figure.data, style), layout, config);
    });
    return Promise.all(all).then(() => { drawn = true; root.dataset.drawn = "true"; });
  }

  async function unpack() {
    const packed = document.getElementById("plotly");
    if (!packed || !figures) return;
    if (!("DecompressionStream" in window)) {
      throw new Error("this browser is too old to unpack what draws them");
    }
    const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("what draws them was not let run");
  }

  // Pictures of a few pixels are shown as squares, others smoothly.
  for (const picture of document.querySelectorAll(".gallery img")) {
    picture.decode().then(() => picture.classList.toggle("tiny", picture.naturalWidth <= 32), () => {});
  }

  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  button.hidden = false;
  showButton();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    keep(root.dataset.theme);
    showButton();
    draw();
  });
  prefersDark.addEventListener("change", () => { showButton(); draw(); });

  // Paper is white.
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme || "";
    root.dataset.theme = "light";
    draw();
  });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    draw();
  });

  unpack().then(draw).catch((error) => {
    if (!drawn) trouble("The charts could not be drawn: " + error.message + ". Their figures are in the tables below them.");
  });
})();
