// Real tables behind the canvases, bar lists, and what the axes of a matrix are called.
import { element } from './dom.js';
import { addStrings, formatNumber, hasString, translate } from './i18n.js';
import { tokenLabel } from './text.js';

let tableCount = 0;

// A token or another text of unknown direction, without quotation marks.
export function plainText(text, lang = '') {
  return element('bdi', { lang: lang || null }, text);
}

export function uniqueId(prefix) {
  tableCount += 1;
  return `${prefix}-${tableCount}`;
}

function tableAxisTokens(ex, name) {
  if (name === 'source' || name === 'element') return ex.source?.tokens ?? [];
  if (name === 'target') return ex.target?.tokens ?? [];
  if (name === 'target_in') {
    const start = { text: '<s>', special: true };
    return [start, ...(ex.target?.tokens ?? []).slice(0, -1)];
  }
  return [];
}

function tableAxisTitle(name) {
  const key = `axis.${name.startsWith('memory+') ? 'memory' : name}`;
  return hasString(key) ? translate(key) : name;
}

// One axis of a site: {name, title, labels, lang, dir, link}; `link` is the state's key that it moves, or null.
export function siteAxis(ex, site, which, count) {
  const name = which === 'query' ? site.query : site.key;
  const given = which === 'query' ? site.query_labels : site.key_labels;
  const base = name.replace(/^memory\+/, '');
  const tokens = tableAxisTokens(ex, base);
  let labels = (given?.map((text) => ({ text })) ?? tokens).map(tokenLabel);
  if (!given && name.startsWith('memory+')) {
    const past = Math.max(0, count - labels.length);
    labels = [...Array.from({ length: past }, (_, i) => `−${past - i}`), ...labels];
  }
  while (labels.length < count) labels.push(String(labels.length + 1));
  const text = base === 'source' || base === 'element' ? ex.source : base.startsWith('target') ? ex.target : null;
  let link = null;
  if (!given && name === 'source') link = 'src';
  else if (!given && name === 'target') link = 'step';
  else if (!given && name === 'target_in' && which === 'query') link = 'step';
  return {
    name,
    title: tableAxisTitle(name),
    labels: labels.slice(0, Math.max(count, 0)),
    lang: text?.lang ?? '',
    dir: text?.dir ?? 'ltr',
    link,
  };
}

// Labels of the groups of a pooled axis: "the … house".
export function pooledLabels(labels, edges) {
  if (!edges) return labels;
  return edges.slice(0, -1).map((from, i) => {
    const to = edges[i + 1] - 1;
    return from === to ? labels[from] : `${labels[from]} … ${labels[to]}`;
  });
}

// columns: [{title, number, width}]; rows: arrays of strings, numbers or nodes; the first cell of a row is its header.
export function dataTable({ caption, columns, rows, className = '', hideCaption = false }) {
  const head = element('tr', {}, columns.map((column) =>
    (column.title ? element('th', { scope: 'col', class: column.number ? 'number' : null }, column.title) : element('td'))));
  const body = rows.map((row) => element('tr', row.attributes ?? {}, (row.cells ?? row).map((cell, i) => {
    const shown = cell instanceof Node ? cell : String(cell);
    const attributes = { class: columns[i]?.number ? 'number' : columns[i]?.className ?? null };
    return i === 0 ? element('th', { scope: 'row', ...attributes }, shown) : element('td', attributes, shown);
  })));
  return element('table', { class: `figures ${className}`.trim() },
    element('caption', { class: hideCaption ? 'hidden' : null }, caption),
    element('thead', {}, head), element('tbody', {}, body));
}

// Every number of a matrix: value(r, c) for each label.
export function matrixTable({ caption, corner, rowLabels, colLabels, value, digits = 3 }) {
  const head = element('tr', {}, element('th', { scope: 'col' }, corner),
    colLabels.map((label) => element('th', { scope: 'col', class: 'number' }, plainText(label))));
  const body = rowLabels.map((label, r) => element('tr', {}, element('th', { scope: 'row' }, plainText(label)),
    colLabels.map((_, c) => element('td', { class: 'number' }, formatNumber(value(r, c), digits)))));
  return element('table', { class: 'figures matrix-table' }, element('caption', {}, caption),
    element('thead', {}, head), element('tbody', {}, body));
}

// A region that scrolls by itself and by the keyboard.
export function scrollRegion(label, ...children) {
  return element('div', { class: 'scroll', role: 'region', 'aria-label': label, tabindex: 0 }, children);
}

// A button that shows and hides a table; `build` makes it when it is opened or, once open, on refresh().
export function tableToggle(label, build) {
  const id = uniqueId('table');
  const region = scrollRegion(label);
  const host = element('div', { id, class: 'table-host', hidden: true }, region);
  const button = element('button', {
    type: 'button', class: 'plain', 'aria-expanded': 'false', 'aria-controls': id,
    onclick: () => toggle(host.hidden),
  }, translate('table.show'));
  const refresh = () => {
    if (!host.hidden) region.replaceChildren(build());
  };
  const toggle = (open) => {
    host.hidden = !open;
    button.setAttribute('aria-expanded', String(open));
    button.textContent = translate(open ? 'table.hide' : 'table.show');
    if (open) refresh();
    else region.replaceChildren();
  };
  return { button, host, region, refresh, toggle, isOpen: () => !host.hidden };
}

// A bar of value / most; negative values grow to the left of a middle line and carry their sign.
export function valueBar(value, most, signed = false) {
  return setBar(element('span', { 'aria-hidden': 'true' }, element('span', { class: 'fill' })), value, most, signed);
}

export function setBar(bar, value, most, signed = false) {
  bar.className = `bar${signed ? (value < 0 ? ' signed minus' : ' signed') : ''}`;
  bar.style.setProperty('--part', most > 0 ? Math.min(1, Math.abs(value) / most) : 0);
  return bar;
}

addStrings(
  {
    'table.show': 'Show as table',
    'table.hide': 'Hide table',
    'axis.source': 'source tokens',
    'axis.target': 'target tokens',
    'axis.target_in': 'decoder input',
    'axis.memory': 'memory and current tokens',
    'axis.sentence': 'sentences',
    'axis.word': 'words',
    'axis.class': 'classes',
    'axis.seed': 'seeds',
    'axis.inducing': 'inducing points',
    'axis.element': 'set elements',
  },
  {
    'table.show': '显示为表格',
    'table.hide': '隐藏表格',
    'axis.source': '原文词元',
    'axis.target': '译文词元',
    'axis.target_in': '解码器输入',
    'axis.memory': '记忆与当前词元',
    'axis.sentence': '句子',
    'axis.word': '词',
    'axis.class': '类别',
    'axis.seed': '种子',
    'axis.inducing': '诱导点',
    'axis.element': '集合元素',
  },
);
