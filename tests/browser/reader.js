/* What hinders a reader: pale words, controls without a name, images without a text, scrolling sideways. */
() => {
  const numbers = (colour) => {
    const found = colour.match(/[\d.]+(e-?\d+)?/g).map(Number);
    const channels = found.slice(0, 3).map((each) => colour.startsWith("color(") ? 255 * each : each);
    return [...channels, found[3] ?? 1];
  };
  const over = ([red, green, blue, alpha], below) => [red, green, blue].map((each, at) => alpha * each + (1 - alpha) * below[at]);
  const ancestors = (each) => each ? [each, ...ancestors(each.parentElement)] : [];
  const ground = (each) => ancestors(each).map((at) => numbers(getComputedStyle(at).backgroundColor))
    .reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
  const luminance = (colour) => colour.map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const contrast = (...colours) => {
    const [low, high] = colours.map(luminance).sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
  };
  const resolved = (name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(${name})`;
    const colour = numbers(getComputedStyle(probe).color).slice(0, 3);
    probe.remove();
    return colour;
  };
  const seen = (each) => each.getClientRects().length && each.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const wrong = [];

  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const text = words.currentNode.data.trim(), each = words.currentNode.parentElement;
    if (!text || each.matches("script, style, option, :disabled, :disabled *") || !seen(each)) continue;
    const drawn = each.closest("svg");
    const style = getComputedStyle(each), opacity = ancestors(each).reduce((all, at) => all * getComputedStyle(at).opacity, 1);
    const [red, green, blue, alpha] = numbers(drawn ? style.fill : style.color);
    // A cell of a chart is coloured between two ends.
    const cell = each.closest(".heatmap-label");
    for (const behind of cell ? ["--low", "--high"].map(resolved) : [ground(drawn ? drawn.parentElement : each)]) {
      const found = contrast(over([red, green, blue, alpha * opacity], behind), behind);
      if (found < 4.5) wrong.push(`contrast ${found.toFixed(2)}: ${text.slice(0, 60)}`);
    }
  }
  for (const each of document.querySelectorAll("a[href], button, input, select, textarea, summary, iframe, [tabindex='0'], [role=meter]")) {
    const labels = [...(each.labels ?? []), ...(each.ariaLabelledByElements ?? [])].map((label) => label.textContent);
    const name = [each.ariaLabel, each.title, each.textContent, ...labels].join("").trim();
    if (seen(each) && !name) wrong.push(`without a name: ${each.outerHTML.slice(0, 90)}`);
  }
  for (const each of document.images) if (!each.hasAttribute("alt")) wrong.push(`without a text: ${each.outerHTML.slice(0, 90)}`);
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("scrolls sideways");
  return [...new Set(wrong)];
}
