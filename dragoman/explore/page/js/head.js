// One head: its matrix with token axes, the strongest links, and what the model does without it.
import { poolGroup } from './data.js';
import { make, setAttributes, setChildren } from './dom.js';
import { cellImage, drawMatrix, matrixLayout, paintImage, paintLater } from './draw.js';
import { chosenHead, effectText, groupTitle, headTitle, matrixScale, siteGroup, switchHead } from './grid.js';
import { addTexts, formatChange, formatNumber, translate } from './i18n.js';
import { clamp, fillGroup, findLargest, hasModifier, makeField, revealRange, sentence } from './parts.js';
import { compareTexts, explainCommand } from './strip.js';
import { dataTable, matrixTable, plainText, scrollRegion, siteAxis, tableToggle, tokenName, valueBar } from './table.js';
import { quoted } from './text.js';
import { onTheme } from './theme.js';

const headText = addTexts('head', {
  layer: ['layer {layer} ({name})', '第 {layer} 层（{name}）'],
  matrix: ['Head {name}: rows are {rows}, columns are {columns}. Arrow keys move, D shows the table.', '头 {name}：行是{rows}，列是{columns}。方向键移动，D 显示表格。'],
  tableName: ['Numbers of the matrix', '矩阵的数字'],
  rows: ['rows: {axis} (each reads)', '行：{axis}（读取者）'],
  columns: ['columns: {axis} (is read)', '列：{axis}（被读取）'],
  cell: ['{query} reads {key}: {value}', '{query} 读取 {key}：{value}'],
  rowTitle: ['What {query} reads', '{query} 读取什么'],
  rest: ['{count} others together: {value}', '其余 {count} 个合计：{value}'],
  links: ['Strongest links', '最强的连接'],
  link: ['Token ← what it reads', '词元 ← 它读取的'],
  measure: ['What the cells show', '格子的含义'],
  'measure.weights': ['Weights', '权重'],
  'measure.contribution': ['Contribution', '贡献'],
  'measure.p_choose': ['Choosing probability', '选择概率'],
  'measure.covered': ['Covered so far', '已覆盖'],
  'measure.energy': ['Energy', '能量'],
  'measure.word_importance': ['Importance of words', '词的重要性'],
  'measure.element_importance': ['Importance of elements', '元素的重要性'],
  contribution: ['Contribution: length of weight × value × output projection; small where a large weight meets a small value.', '贡献：权重 × 值 × 输出投影的长度；大权重落在小的值上时仍然小。'],
  noContribution: ['No contributions are stored for this layer; weights are shown.', '没有存这一层的贡献，显示的是权重。'],
  pooled: ['Long text: {queries} × {keys} cells are pooled to {rows} × {columns}; each is the weight from group to group.', '文本较长：{queries} × {keys} 个格子合并为 {rows} × {columns}；一格是一组到一组的权重。'],
  zoomExact: ['Zoom in to see every token.', '放大可看到每个词元。'],
  sub: ['Rows sum to at most 1: the rest was not read.', '每行的和不超过 1：其余部分没有读取。'],
  none: ['Rows do not sum to 1.', '每行的和不是 1。'],
  zoom: ['Zoom', '缩放'],
  zoomIn: ['Zoom in at the cursor', '在光标处放大'],
  zoomOut: ['Zoom out', '缩小'],
  whole: ['Whole', '全部'],
  visual: ['Visual order', '视觉顺序'],
  switchOff: ['Switch {name} off', '关闭 {name}'],
  switchOn: ['Switch {name} on', '打开 {name}'],
  parts: ['Other parts to switch off', '其他可关闭的部分'],
  partOff: ['Try without {name}', '试试没有 {name}'],
  without: ['Without {heads}', '没有 {heads}'],
  hint: ['Switch it off to see what the model does then.', '关闭它，看看模型会怎样。'],
  computing: ['Translating again without it…', '正在不用它重新翻译…'],
  needsModel: ['This file does not hold that run. With the model, this computes it:', '这个文件没有存这次计算。有模型时可用此命令计算：'],
  effects: ['Change of each token’s log-probability', '每个词元对数概率的变化'],
});

const HEAD_LINKS = 10;
const HEAD_BARS = 8;
const HEAD_HEIGHT = 620;
const HEAD_EXACT = 256;

// One axis of a matrix and its part [from, to] that is shown; the axis has groups between `edges` where it is pooled.
function headAxis(ex, site, which, size, edges, zoom) {
  const count = edges?.at(-1) ?? size;
  const [from, to] = (zoom ?? [0, count - 1]).map((at) => clamp(at, 0, count - 1));
  return { ...siteAxis(ex, site, which, count), count, edges, from, to };
}

// The part of a head's matrix that is shown. Its axes, `rows` and `cols`, have for each of their `size` rows or columns
// the first and last position that it stands for in `ranges`, and its name in `names`.
function headRegion(ex, { site: given, head, measure, extra, zoom, visual, exact }) {
  const site = headStack(ex, given, measure) ?? given;
  const other = headExtras(ex, site).includes(extra) ? ex.tensor(ex.extras[extra]) : null;
  const own = other ?? site.stacked ?? ex.siteMatrix(site.id, measure);
  const matrix = own ?? ex.siteMatrix(site.id, 'weights');
  if (!matrix) return null;
  const measured = other ? extra : own ? measure : 'weights';
  const [, height, width] = matrix.shape;
  const rows = headAxis(ex, site, 'query', height, matrix.pool?.q, zoom?.slice(0, 2));
  const cols = headAxis(ex, site, 'key', width, matrix.pool?.k, zoom?.slice(2));
  const key = [ex.digest, site.id, head, measured, rows.from, rows.to, cols.from, cols.to].join(' ');
  const isExact = exact?.key === key;
  const axes = [rows, cols];
  for (const axis of axes) {
    const edges = isExact ? null : axis.edges;
    axis.start = poolGroup(edges, axis.from);
    axis.size = poolGroup(edges, axis.to) - axis.start + 1;
    axis.ranges = Array.from({ length: axis.size }, (_, i) => {
      const at = axis.start + i;
      return edges ? [edges[at], edges[at + 1] - 1] : [at, at];
    });
  }
  const cell = (r, c) => (isExact
    ? exact.data[r * cols.size + c] : matrix.data[(head * height + rows.start + r) * width + cols.start + c]);
  const isMirrored = visual && cols.dir === 'rtl';
  const order = [...cols.ranges.keys()];
  if (isMirrored) order.reverse();
  if (!site.ordered) {
    const sums = order.map((_, c) => rows.ranges.reduce((sum, range, r) => sum + cell(r, c), 0));
    order.sort((a, b) => sums[b] - sums[a]);
  }
  cols.ranges = order.map((c) => cols.ranges[c]);
  for (const axis of axes) {
    axis.names = axis.ranges.map(([from, to]) => [...new Set([from, to])].map((at) => axis.labels[at]).join(' … '));
  }
  // A selected source token moves the rows where both axes are the source.
  if (cols.link === rows.link) cols.link = null;
  const path = ex.tensor(ex.extras.path)?.data;
  const hasPath = !other && !isMirrored && cols.size === cols.count && rows.size === path?.length;
  return {
    axes, rows, cols, key, measured,
    values: Float32Array.from({ length: rows.size * cols.size }, (_, at) => cell(Math.floor(at / cols.size), order[at % cols.size])),
    isPooled: Boolean(matrix.pool && !isExact),
    scale: matrixScale(matrix, measured),
    signed: matrix.data.some((value) => value < 0),
    path: hasPath ? path : [], // the source position that a hard alignment chose for each target token
    segments: isMirrored ? [] : site.segments,
  };
}

// Words of all sentences in one matrix: sites of a hierarchical network that have a row each.
function headStack(ex, site, measure) {
  const isLike = (each) => each.kind === 'pool' && each.query === 'sentence' && each.key === site.key;
  const parts = isLike(site) ? ex.sites.filter(isLike) : [];
  const rows = parts.map((each) => ex.siteMatrix(each.id, measure));
  if (rows.length < 2 || rows.some((each) => each?.shape[0] !== 1 || each.pool)) return null;
  return {
    ...site,
    stacked: { data: new Float32Array(rows.flatMap(({ data }) => [...data])), shape: [1, rows.length, rows[0].shape[2]] },
    query_labels: parts.flatMap((each) => each.query_labels),
    segments: parts.flatMap((each) => each.segments),
  };
}

// Names of other matrices with the shape of this site's: choosing probabilities, energies.
function headExtras(ex, site) {
  const shape = (name) => String(ex.tensors[name]?.shape);
  return Object.keys(ex.extras).filter((name) => shape(ex.extras[name]) === shape(site.tensor));
}

const headFind = ({ ranges }, position) => ranges.findIndex(([from, to]) => from <= position && position <= to);

const headLabel = (axis, at) => plainText(axis.names[at], axis.lang);

function headBar(name, value, most, isChosen) {
  return make('li', { class: isChosen && 'is-chosen' },
    make('span.bar-name', name), valueBar(value, most), make('span.bar-value', formatNumber(value, 3)));
}

// How much each input token or set element counted, where the model has such weights.
function headImportance({ extras, tensor, source }) {
  const name = Object.keys(extras).find((each) => each.endsWith('_importance'));
  const weights = tensor(extras[name]);
  if (!weights) return null;
  const bar = (i) => headBar(plainText(tokenName(source.tokens, i), source.lang), weights.data[i], matrixScale(weights, name));
  return make('div', make('h3', headText(`measure.${name}`)), make('ol.bars', findLargest(weights.data, HEAD_LINKS).map(bar)));
}

// What the model writes without some heads, as `off` of the server and the ablations of a file have it.
function headResult(ex, result) {
  const most = Math.max(0.01, ...result.effect.map(Math.abs));
  const { tokens, lang } = ex.target;
  return [
    make('p.lead', sentence('heads.exact', { change: make('b', formatChange(result.sum_change)) })),
    ...compareTexts(ex, result),
    scrollRegion(headText('effects'), dataTable({
      caption: headText('effects'),
      className: 'effects',
      columns: [{ title: translate('nav.token') }, { title: translate('heads.sort.effect'), number: true }, { className: 'bar-cell' }],
      rows: result.effect.map((change, t) => [plainText(tokenName(tokens, t), lang), formatChange(change), valueBar(change, most, true)]),
    })),
  ];
}

export function mountHead(root, { store, api, current, onExplanation, announce, fail }) {
  const canvas = make('canvas.matrix-canvas', { 'aria-hidden': true });
  const spacer = make('div', { 'aria-hidden': true }, canvas);
  const gridCell = make('div', { role: 'gridcell', id: 'matrix-cell' });
  const gridRow = make('div.hidden', { role: 'row' }, gridCell);
  const matrix = make('div.matrix', {
    role: 'grid', tabindex: 0, 'data-widget': 'matrix', 'aria-readonly': true, 'aria-activedescendant': 'matrix-cell',
    onscroll: paint,
    onpointermove: (event) => eventCell(event, showReadout),
    onpointerleave: () => showReadout(...position()),
    onclick: (event) => eventCell(event, (row, col) => move(row, col, true)),
    onkeydown: pressKey,
  }, spacer, gridRow);
  const image = make('canvas');
  const sitePick = make('select', { onchange: () => choose(0) });
  const headPick = make('select', { onchange: () => choose(Number(headPick.value)) });
  const measures = make('div.segments');
  const zooms = make('div.segments');
  const visual = make('button.plain', { onclick: () => store.set({ visual: !store.get().visual }) });
  const offButton = make('button', { onclick: toggleOff });
  const axes = make('p.axes');
  const readout = make('p.cell-readout');
  const note = make('p.quiet');
  const rowTitle = make('h3');
  const bars = make('ol.bars');
  const links = make('div');
  const effect = make('div.effect');
  const asked = new Set();
  let table = null;
  let region = null;
  let layout = null;
  let width = 0;
  let exact = null; // {key of a region, its values}
  let extra = null;
  let cursor = [0, -1];
  let effectKey = '';
  let revealed = '';

  const rowValues = (row) => region.values.subarray(row * region.cols.size, (row + 1) * region.cols.size);
  const valueAt = (row, col) => rowValues(row)[col];
  const link = (row, col) => [headLabel(region.rows, row), ' ← ', headLabel(region.cols, col)];

  function choose(head) {
    store.set({ site: sitePick.value, head, zoom: null }, { push: true });
  }

  // Row and column of the cursor in the region; the column is the row's strongest until one was chosen.
  function position() {
    const { rows, cols } = region;
    const state = store.get();
    const row = headFind(rows, state[rows.link] ?? cursor[0]);
    const col = headFind(cols, (cols.link ? state[cols.link] : cursor[1]) ?? -1);
    return [row, col < 0 && row >= 0 ? findLargest(rowValues(row), 1)[0] : col];
  }

  function move(row, col, push = false) {
    const state = store.get();
    const patch = {};
    cursor = region.axes.map(({ link: key, ranges }, i) => {
      const [from, to] = ranges[[row, col][i]];
      const now = state[key];
      if (key) patch[key] = now !== null && from <= now && now <= to ? now : from;
      return from;
    });
    store.set(patch, { push });
    showPosition();
    announce(cellText(row, col));
  }

  function cellText(row, col) {
    return headText('cell', {
      query: region.rows.names[row], key: region.cols.names[col], value: formatNumber(valueAt(row, col), 3),
    });
  }

  function paint() {
    if (!region || !layout || !width) return;
    const { rows, cols, segments, path, isPooled } = region;
    const [row, col] = position();
    // A new position comes into view; from there the person may scroll away.
    const { left, top, cell } = layout;
    const place = [region.key, row, col].join();
    if (row >= 0 && place !== revealed) {
      revealed = place;
      revealRange(matrix, 'scrollLeft', 'clientWidth', col * cell, left + (col + 1) * cell + 4);
      revealRange(matrix, 'scrollTop', 'clientHeight', row * cell, top + (row + 1) * cell + 4);
    }
    drawMatrix(canvas, {
      layout, image, row, col, path,
      rowLabels: rows.names, colLabels: cols.names, pooled: isPooled,
      width: matrix.clientWidth, height: matrix.clientHeight, scrollX: matrix.scrollLeft, scrollY: matrix.scrollTop,
      colEdges: segments.map(([, from]) => headFind(cols, from)).filter((c) => c > 0),
    });
  }

  function arrange() {
    if (!region || !width) return;
    layout = matrixLayout(canvas, region.rows.names, region.cols.names, width);
    matrix.dataset.cells = `${layout.left} ${layout.top} ${layout.cell}`;
    Object.assign(spacer.style, { width: `${layout.width}px`, height: `${layout.height}px` });
    const scrollbar = layout.width > width ? 16 : 0;
    matrix.style.height = `${Math.min(layout.height, HEAD_HEIGHT) + scrollbar}px`;
    paintLater(paint);
  }

  function showPosition() {
    const [row, col] = position();
    paintLater(paint);
    if (row < 0) return;
    gridRow.ariaRowIndex = row + 1;
    gridCell.ariaColIndex = col + 1;
    gridCell.textContent = cellText(row, col);
    showReadout(row, col);
    const { rows, cols, measured, scale } = region;
    const values = rowValues(row);
    const shown = findLargest(values, HEAD_BARS);
    const left = shown.reduce((rest, c) => rest - values[c], values.reduce((sum, value) => sum + value, 0));
    const count = values.length - shown.length;
    setChildren(rowTitle, sentence('head.rowTitle', { query: quoted(rows.names[row], rows.lang) }));
    setChildren(bars,
      shown.map((c) => headBar(headLabel(cols, c), values[c], measured === 'weights' ? 1 : scale, c === col)),
      count > 0 && make('li.rest.quiet', headText('rest', { count, value: formatNumber(left, 3) })));
  }

  function showReadout(row, col) {
    if (row >= 0) setChildren(readout, link(row, col), ' ', make('b', formatNumber(valueAt(row, col), 3)));
  }

  function showLinks() {
    const { values, cols, measured } = region;
    setChildren(links, dataTable({
      caption: headText('links'),
      className: 'links',
      columns: [{ title: headText('link') }, { title: headText(`measure.${measured}`), number: true }],
      rows: findLargest(values, HEAD_LINKS).filter((at) => values[at] > 0).map((at) => {
        const cell = [Math.floor(at / cols.size), at % cols.size];
        return [make('button.link', { onclick: () => move(...cell, true) }, link(...cell)), formatNumber(values[at], 3)];
      }),
    }));
  }

  // Everything about the chosen head; `exact` values of a pooled region come in later.
  function show() {
    const ex = current();
    const state = store.get();
    const chosen = ex && chosenHead(ex, state);
    const site = chosen && ex.site(chosen.site);
    const shown = site && headRegion(ex, { ...state, site, head: chosen.head, extra, exact });
    if (!shown) return;
    region = shown;
    const { rows, cols, values, scale, signed } = region;
    paintImage(image, cellImage(values, 0, rows.size, cols.size, { scale, signed }));
    setAttributes(matrix, {
      'aria-rowcount': rows.size,
      'aria-colcount': cols.size,
      'aria-label': headText('matrix', { name: chosen.name, rows: rows.title, columns: cols.title }),
    });
    showControls(ex, state, site, chosen);
    paintLater(arrange);
    showPosition();
    showLinks();
    table.refresh();
    fetchExact(ex, site, chosen.head);
  }

  function showControls(ex, state, site, { head, name }) {
    const { rows, cols, measured, isPooled } = region;
    sitePick.value = site.id;
    if (headPick.length !== site.heads) setChildren(headPick, Array.from({ length: site.heads }, (_, h) => make('option', h)));
    headPick.value = head;
    const extras = headExtras(ex, site);
    fillGroup(measures, headText('measure'), ['weights', 'contribution', ...extras].map((measure) =>
      [headText(`measure.${measure}`), {
        'aria-pressed': measured === measure,
        disabled: measure === 'contribution' && !site.contribution,
        onclick: () => {
          extra = extras.includes(measure) ? measure : null;
          if (!extra) store.set({ measure });
          show();
        },
      }]));
    const isSmall = rows.size < 5 && cols.size < 5;
    fillGroup(zooms, headText('zoom'), [
      ['+', { 'aria-label': headText('zoomIn'), onclick: () => zoom(0.5), disabled: isSmall }],
      ['−', { 'aria-label': headText('zoomOut'), onclick: () => zoom(2), disabled: !state.zoom }],
      [headText('whole'), { onclick: () => store.set({ zoom: null }), disabled: !state.zoom }],
    ]);
    visual.textContent = headText('visual');
    visual.hidden = cols.dir !== 'rtl';
    visual.ariaPressed = state.visual;
    const isOff = state.off.includes(name);
    offButton.textContent = translate(isOff ? 'head.switchOn' : 'head.switchOff', { name });
    offButton.ariaPressed = isOff;
    const arrow = (text) => make('span', { 'aria-hidden': true }, text);
    setChildren(axes,
      make('span', arrow('↓ '), headText('rows', { axis: rows.title })),
      make('span', arrow('→ '), headText('columns', { axis: cols.title })),
      ...region.segments.map(([segment, from, to]) => make('span', `${segment}: ${from + 1}–${to}`)));
    const sizes = { rows: rows.size, columns: cols.size, queries: rows.count, keys: cols.count };
    note.textContent = [
      measured === 'contribution' && 'contribution',
      state.measure === 'contribution' && !site.contribution && 'noContribution',
      isPooled && 'pooled',
      isPooled && api && 'zoomExact',
      site.sum !== 'one' && site.sum,
    ].filter(Boolean).map((key) => headText(key, sizes)).join(' ');
    note.hidden = !note.textContent;
  }

  // Half or double the region around the cursor.
  function zoom(factor) {
    const at = position();
    const parts = region.axes.map(({ from, to, count, ranges }, i) => {
      const size = clamp(Math.round((to - from + 1) * factor), 4, count);
      const start = clamp(Math.round(ranges[Math.max(0, at[i])][0] - size / 2), 0, count - size);
      return [start, Math.min(count, start + size) - 1];
    });
    const isAll = region.axes.every(({ count }, i) => parts[i][1] - parts[i][0] + 1 >= count);
    store.set({ zoom: isAll ? null : parts.flat() });
  }

  async function fetchExact(ex, site, head) {
    const { key, measured, isPooled } = region;
    const parts = region.axes.map(({ from, to }) => [from, to]);
    if (!api || !isPooled || !store.get().zoom || parts.some(([from, to]) => to - from >= HEAD_EXACT)) return;
    try {
      const { data } = await api.tensor(measured === 'contribution' ? site.contribution : site.tensor, head, ...parts);
      exact = { key, data };
      if (current() === ex) show();
    } catch (error) {
      fail(error);
    }
  }

  function toggleOff() {
    const { site, head, name } = chosenHead(current(), store.get());
    switchHead(name, { store, announce }, { site, head });
  }

  // What the model does without the heads that are off, or without `part` (a memory, a seed): stored in a
  // file, asked of the model when served.
  function showEffect(part) {
    const ex = current();
    const chosen = chosenHead(ex, store.get());
    if (!chosen) return;
    const off = part ? [part] : [...store.get().off].sort();
    const names = off.length ? off : [chosen.name];
    const effects = names.map((name) => ex.headSummary(name)?.effect);
    const sum = effects.reduce((total, each) => total + (each?.estimate ?? NaN), 0);
    const guess = effectText(names.length > 1 ? { estimate: sum } : effects[0]);
    const key = off.join();
    const result = ex.ablations[key];
    const shown = result ? headResult(ex, result) : [make('p', guess)];
    const say = (text, attributes = {}) => shown.push(make('p.quiet', attributes, headText(text)));
    if (!off.length && !Number.isFinite(effects[0]?.exact)) say('hint');
    if (off.length && !result) {
      say(api ? 'computing' : 'needsModel', { role: api && 'status' });
      if (!api) shown.push(make('pre.command', { tabindex: 0 }, explainCommand(ex, [off.length > 1 ? '--off' : '--ablations', key])));
    }
    const parts = (ex.model.off_switches ?? []).filter((name) => api || ex.ablations[name]);
    setChildren(effect, make('h3', headText('without', { heads: names.join(', ') })), ...shown,
      parts.length > 0 && make('div.row', { role: 'group', 'aria-label': headText('parts') }, parts.map((name) =>
        make('button', { onclick: () => showEffect(name) }, headText('partOff', { name })))));
    effectKey = key;
    if (off.length && api && !result) ask(ex, off, key, part);
  }

  async function ask(ex, off, key, part) {
    const id = `${ex.digest} ${key}`;
    const isShown = () => current() === ex && effectKey === key;
    if (asked.has(id)) return;
    asked.add(id);
    try {
      const answer = await api.off(off);
      ex.ablations[key] = answer;
      const head = off.length === 1 && ex.headSummary(key);
      if (head) head.effect.exact = answer.sum_change;
      if (!isShown()) return;
      showEffect(part);
      announce(effectText({ exact: answer.sum_change }));
    } catch (error) {
      fail(error);
      if (isShown()) effect.querySelector('[role="status"]').textContent = translate('page.failed', { error: error.message });
    } finally {
      asked.delete(id);
    }
  }

  function buildTable() {
    const { rows, cols } = region;
    return matrixTable({
      caption: headTitle(current(), chosenHead(current(), store.get()).name),
      corner: `${rows.title} ↓ ${cols.title} →`,
      rowLabels: rows.names,
      colLabels: cols.names,
      value: valueAt,
    });
  }

  // Call `then` with the row and column under the pointer.
  function eventCell({ clientX, clientY }, then) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [clientX - box.left - layout.left, clientY - box.top - layout.top];
    const col = Math.floor((x + matrix.scrollLeft) / layout.cell);
    const row = Math.floor((y + matrix.scrollTop) / layout.cell);
    if (x >= 0 && y >= 0 && row < region.rows.size && col < region.cols.size) then(row, col);
  }

  function pressKey(event) {
    const by = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0],
      Home: [0, -Infinity], End: [0, Infinity],
    }[event.key];
    const action = { '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), ' ': toggleOff, d: table.toggle }[event.key];
    if (hasModifier(event) || !(by || action)) return;
    event.preventDefault();
    if (action) action();
    else move(...position().map((at, i) => clamp(Math.max(0, at) + by[i], 0, region.axes[i].ranges.length - 1)));
  }

  new ResizeObserver(() => {
    if (Math.abs(matrix.clientWidth - width) < 1) return;
    width = matrix.clientWidth;
    arrange();
  }).observe(matrix);

  onExplanation((ex) => {
    const sites = Object.groupBy(ex.sites.filter((site) => site.tensor), siteGroup);
    setChildren(sitePick, Object.entries(sites).map(([group, list]) => make('optgroup', { label: groupTitle(group) },
      list.map(({ id, layer }) => make('option', { value: id }, headText('layer', { layer, name: id }))))));
    exact = null;
    extra = null;
    cursor = [0, -1];
    table = tableToggle(headText('tableName'), buildTable);
    setAttributes(table.button, { 'aria-keyshortcuts': 'd' });
    setChildren(root,
      make('div.controls', makeField(translate('heads.sort.layer'), sitePick), makeField(translate('heads.column.head'), headPick),
        measures, offButton),
      make('div.head-layout',
        make('div', axes, matrix, make('div.controls.below', readout, zooms, visual, table.button), note, table.host, effect),
        make('div.head-side', make('div', rowTitle, bars), headImportance(ex), links)));
    show();
    showEffect();
  });
  store.subscribe((state, changed) => {
    if (!current() || !table) return;
    const any = (...keys) => keys.some((key) => changed.has(key));
    const isFollowing = state.site === null && any('step'); // the head that reads the selected token
    if (isFollowing || any('site', 'head', 'measure', 'zoom', 'visual', 'off')) show();
    else if (any('step', 'src') && region) showPosition();
    if (isFollowing || any('site', 'head', 'off')) showEffect();
  });
  onTheme(show);
}
