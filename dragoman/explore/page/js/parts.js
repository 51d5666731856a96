// What several panels share: short forms for elements and sentences, links, and the way to a panel.
import { byId, make, setChildren } from './dom.js';
import { formatProbability, translate } from './i18n.js';
import { fill } from './text.js';
import { onTheme } from './theme.js';

// A string with elements in it.
export const sentence = (key, parts) => fill(translate(key), parts);

// [term, value] as a list; terms without a value are left out.
export const termList = (kind, rows) => make(`dl.${kind}`, rows.map(([term, value]) => value && make('div', make('dt', term), make('dd', value))).filter(Boolean));

// The texts that are there, with a separator between them.
export const joinTexts = (texts, separator) => texts.filter(Boolean).join(separator);

export const makeField = (name, control) => make('label.field', make('span', name), control);

// Fill a group with buttons, [text, attributes], after what it may begin with; the one that had the focus keeps it.
export function fillGroup(group, label, buttons, ...first) {
  const focused = [...group.children].indexOf(document.activeElement);
  group.role = 'group';
  group.ariaLabel = label;
  setChildren(group, first, ...buttons.map(([text, attributes]) => make('button', attributes, text)));
  group.children[focused]?.focus();
}

export const clamp = (value, least, most) => Math.max(least, Math.min(most, value));

// Indices of the largest of some numbers in a typed array, best first.
export function findLargest(values, count) {
  const least = values.toSorted().at(-count) ?? -Infinity;
  const found = [];
  values.forEach((value, i) => value >= least && found.push(i));
  return found.sort((a, b) => values[b] - values[a]).slice(0, count);
}

// Scroll a box as little as brings [from, to] into view.
export function revealRange(box, side, size, from, to) {
  if (from < box[side]) box[side] = from;
  else if (to > box[side] + box[size]) box[side] = to - box[size];
}

export const formatLogprob = (logprob) => formatProbability(Math.exp(logprob));

export const isEnter = (event) => event.key === 'Enter' || event.key === ' ';

export const hasModifier = (event) => event.ctrlKey || event.metaKey || event.altKey;

export async function copyAddress(address, announce) {
  const copied = await navigator.clipboard.writeText(address).then(() => true, () => false);
  announce(translate(copied ? 'page.copied' : 'page.copyFailed'));
}

export const panelOf = (view) => byId(`panel-${view}`);

export function scrollToPanel(view) {
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  panelOf(view).scrollIntoView({ block: 'start', behavior: calm ? 'instant' : 'smooth' });
}

// A canvas in a box: draw(canvas, width) runs on paint(), with every new width of the box and every theme.
export function makeChart(kind, draw) {
  const canvas = make(`canvas.${kind}`, { 'aria-hidden': true });
  const box = make('div.chart-box', canvas);
  let width = 0;
  const paint = () => width && draw(canvas, width);
  new ResizeObserver(() => {
    if (Math.abs(box.clientWidth - width) < 1) return;
    width = box.clientWidth;
    paint();
  }).observe(box);
  onTheme(paint);
  return { box, paint };
}
