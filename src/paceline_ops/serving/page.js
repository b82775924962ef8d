"use strict";
const form = document.getElementById("form");
const status = document.getElementById("status");
const answers = document.getElementById("answers");
const most = { images: Number(form.dataset.images), bytes: Number(form.dataset.bytes) };
let asked = 0;

const made = (name, className, text) => {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const say = (text, bad) => {
  status.textContent = text;
  status.classList.toggle("bad", Boolean(bad));
};

/* The bars of the probabilities of labels. */
const bars = (labels, probabilities) => {
  const list = made("ul", "bars");
  labels.forEach((label, number) => {
    const bar = made("li");
    const probability = probabilities[number];
    const value = `${(100 * probability).toFixed(1)} %`;
    const meter = made("span", "meter");
    const facts = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": probability };
    for (const [name, fact] of Object.entries(facts)) meter.setAttribute(name, fact);
    meter.append(made("span"));
    meter.firstChild.style.width = `${100 * probability}%`;
    bar.append(made("span", "label", label), meter, made("span", "value", value));
    list.append(bar);
  });
  return list;
};

for (const each of document.querySelectorAll(".address")) each.textContent = new URL(".", location.href);
