// Real tables behind the canvases, bars, and what the axes of a matrix are called.
import { make, setChildren } from './dom.js';
import { addTexts, formatNumber, translate } from './i18n.js';
import { tokenLabel } from './text.js';

addTexts('table', {
  show: ['Show as table', '显示为表格'],
  hide: ['Hide table', '隐藏表格'],
});
addTexts('axis', {
  source: ['source tokens', '原文词元'],
  'source@other': ['input tokens', '输入词元'],
  target: ['target tokens', '译文词元'],
  target_in: ['decoder input', '解码器输入'],
  memory: ['memory', '记忆'],
  sentence: ['sentences', '句子'],
  class: ['classes', '类别'],
  seed: ['seeds', '种子'],
  inducing: ['inducing points', '诱导点'],
  element: ['set elements', '集合元素'],
});

let tableCount = 0;

// A token or another text of unknown direction, without quotation marks.
export const plainText = (text, lang) => make('bdi', { lang: lang || null }, text);

// The label of token i; its number where there is no such token.
export const tokenName = (tokens, i) => (tokens[i] ? tokenLabel(tokens[i]) : String(i + 1));

// The axis "query" or "key" of a site: {title, labels, lang, dir, link}; `link` is the state's key that it moves, or null.
export function siteAxis({ source, target }, site, which, count) {
  const name = site[which];
  const given = site[`${which}_labels`]?.map((text) => ({ text }));
  const side = { source, element: source, target, target_in: target }[name.split('+').at(-1)];
  const tokens = name === 'target_in' ? [{ text: '<s>' }, ...target.tokens.slice(0, -1)] : side?.tokens ?? [];
  return {
    title: name.split('+').map((part) => translate(`axis.${part}`)).join(' + '),
    labels: Array.from({ length: count }, (_, i) => tokenName(given ?? tokens, i)),
    lang: side?.lang,
    dir: side?.dir,
    link: (!given && { source: 'src', target: 'step' }[name]) || null,
  };
}

// columns: [{title, number, className}]; rows: arrays of texts or nodes; the first cell of a row is its header.
export function dataTable({ caption, columns, rows, className, hideCaption }) {
  const header = ({ title, number }) => (title ? make('th', { scope: 'col', class: number && 'number' }, title) : make('td'));
  const cell = (content, i) => make(i ? 'td' : 'th', {
    scope: i ? null : 'row', class: columns[i].number ? 'number' : columns[i].className,
  }, content);
  return make('table', { class: `figures ${className ?? ''}` },
    make('caption', { class: hideCaption && 'hidden' }, caption),
    make('thead', make('tr', columns.map(header))), make('tbody', rows.map((row) => make('tr', row.map(cell)))));
}

// Every number of a matrix: value(r, c) for each label.
export function matrixTable({ caption, corner, rowLabels, colLabels, value }) {
  return dataTable({
    caption,
    className: 'matrix-table',
    columns: [{ title: corner }, ...colLabels.map((label) => ({ title: plainText(label), number: true }))],
    rows: rowLabels.map((label, r) => [plainText(label), ...colLabels.map((_, c) => formatNumber(value(r, c), 3))]),
  });
}

// A region that scrolls by itself and by the keyboard.
export const scrollRegion = (label, ...children) => make('div.scroll', { role: 'region', 'aria-label': label, tabindex: 0 }, children);

// A button that shows and hides a table; `build` makes it when it is opened or, once open, on refresh().
export function tableToggle(label, build) {
  const id = `table-${tableCount++}`;
  const region = scrollRegion(label);
  const host = make('div.table-host', { id, hidden: true }, region);
  const button = make('button.plain', { 'aria-controls': id, onclick: toggle });
  function refresh() {
    button.ariaExpanded = !host.hidden;
    button.textContent = translate(host.hidden ? 'table.show' : 'table.hide');
    setChildren(region, !host.hidden && build());
  }
  function toggle() {
    host.hidden = !host.hidden;
    refresh();
  }
  refresh();
  return { button, host, refresh, toggle };
}

// A bar of value / most; negative values grow to the left of a middle line and carry their sign.
export const valueBar = (value, most, signed) => setBar(make('span', { 'aria-hidden': true }, make('span.fill')), value, most, signed);

export function setBar(bar, value, most, signed) {
  bar.className = `bar${signed ? ' signed' : ''}${signed && value < 0 ? ' minus' : ''}`;
  bar.style.setProperty('--part', most > 0 ? Math.min(1, Math.abs(value) / most) : 0);
  return bar;
}
