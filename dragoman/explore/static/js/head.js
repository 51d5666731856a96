// One head: its matrix with token axes, the strongest links, and what the model does without it.
import { poolGroup } from './data.js';
import { element, setAttributes } from './dom.js';
import { cellImage, drawMatrix, matrixLayout, paintImage, paintLater } from './draw.js';
import { chosenHead, groupTitle, headTitle, matrixScale } from './grid.js';
import { addStrings, formatChange, formatNumber, hasString, translate } from './i18n.js';
import { headName } from './state.js';
import { explainCommand } from './strip.js';
import { dataTable, matrixTable, plainText, pooledLabels, scrollRegion, siteAxis, tableToggle, uniqueId, valueBar } from './table.js';
import { compareTokens, fill, quoted, tokenLabel, tokenRanges } from './text.js';
import { onTheme } from './theme.js';

const HEAD_LINKS = 10;
const HEAD_BARS = 8;
const HEAD_HEIGHT = 620;
const HEAD_EXACT = 256;

// The part of a head's matrix that is shown: labels and values by row and column, and which positions each stands for.
function headRegion(ex, { site: one, head, measure, extra, zoom, visual, exact }) {
  const site = headStack(ex, one, measure) ?? one;
  const more = headExtras(ex, site).includes(extra) ? ex.tensor(ex.extras[extra]) : null;
  const own = more ?? site.stacked ?? ex.siteMatrix(site.id, measure);
  const matrix = own ?? ex.siteMatrix(site.id, 'weights');
  if (!matrix) return null;
  const measured = more ? extra : own ? measure : 'weights';
  const [, allRows, allCols] = matrix.shape;
  const { q = null, k = null } = matrix.pool ?? {};
  const queries = q ? q.at(-1) : allRows;
  const keys = k ? k.at(-1) : allCols;
  const rowAxis = siteAxis(ex, site, 'query', queries);
  const colAxis = siteAxis(ex, site, 'key', keys);
  const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
  const [q0, q1, k0, k1] = zoom
    ? [clamp(zoom[0], queries), clamp(zoom[1], queries), clamp(zoom[2], keys), clamp(zoom[3], keys)]
    : [0, queries - 1, 0, keys - 1];
  const useExact = exact && exact.key === headExactKey(ex, site, head, measure, [q0, q1, k0, k1]);
  const rowEdges = useExact ? null : q;
  const colEdges = useExact ? null : k;
  const r0 = poolGroup(rowEdges, q0);
  const c0 = poolGroup(colEdges, k0);
  const rows = poolGroup(rowEdges, q1) - r0 + 1;
  const cols = poolGroup(colEdges, k1) - c0 + 1;
  const mirrored = visual && colAxis.dir === 'rtl';
  const cell = (r, c) => (useExact ? exact.data[r * cols + c] : matrix.data[(head * allRows + r0 + r) * allCols + c0 + c]);
  const order = Array.from({ length: cols }, (_, c) => (mirrored ? cols - 1 - c : c));
  if (site.ordered === false) {
    const sums = order.map((c) => Array.from({ length: rows }, (_, r) => cell(r, c)).reduce((a, b) => a + b, 0));
    order.sort((a, b) => sums[b] - sums[a]);
  }
  const values = new Float32Array(rows * cols);
  for (let r = 0; r < rows; r++) order.forEach((from, c) => (values[r * cols + c] = cell(r, from)));
  const range = (edges, start, at) => (edges ? [edges[start + at], edges[start + at + 1] - 1] : [start + at, start + at]);
  const rowRanges = Array.from({ length: rows }, (_, r) => range(rowEdges, r0, r));
  const colRanges = Array.from({ length: cols }, (_, c) => range(colEdges, c0, order[c]));
  const find = (ranges, position) => ranges.findIndex(([from, to]) => from <= position && position <= to);
  const title = (labels, ranges) => ranges.map(([from, to]) => pooledLabels(labels, [from, to + 1])[0]);
  return {
    matrix, values, rows, cols, rowAxis, colAxis, rowRanges, colRanges, queries, keys,
    rowLabels: title(rowAxis.labels, rowRanges),
    colLabels: title(colAxis.labels, colRanges),
    rowOf: (position) => find(rowRanges, position),
    colOf: (position) => find(colRanges, position),
    box: [q0, q1, k0, k1],
    pooled: Boolean(!useExact && (q || k)),
    measured,
    scale: more ? headMost(matrix.data) : matrixScale(matrix, measured),
    signed: Boolean(more && matrix.data.some((value) => value < 0)),
    path: more || cols !== keys || mirrored ? null : headPath(ex, rows),
    segments: mirrored ? [] : (site.segments ?? []),
  };
}

// Words of all sentences in one matrix: sites of a hierarchical network that have a row each.
function headStack(ex, site, measure) {
  if (site.kind !== 'pool' || site.query !== 'sentence') return null;
  const parts = ex.sites.filter((each) => each.kind === 'pool' && each.query === 'sentence' && each.key === site.key);
  const rows = parts.map((each) => ex.siteMatrix(each.id, measure));
  if (parts.length < 2 || rows.some((each) => each?.shape.slice(0, 2).join() !== '1,1' || each.pool || each.shape[2] !== rows[0].shape[2])) return null;
  const data = new Float32Array(rows.flatMap((each) => [...each.data]));
  return {
    ...site,
    stacked: { data, shape: [1, rows.length, rows[0].shape[2]], pool: null },
    query_labels: parts.flatMap((each) => each.query_labels),
    segments: parts.flatMap((each) => each.segments ?? []),
  };
}

// Names of other matrices with the shape of this site's: choosing probabilities, energies.
function headExtras(ex, site) {
  const shape = String(ex.tensors[site.tensor]?.shape);
  return Object.keys(ex.extras ?? {}).filter((name) => String(ex.tensors[ex.extras[name]]?.shape) === shape);
}

function headMost(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
}

// The source position that a hard alignment chose for each target token.
function headPath(ex, rows) {
  const path = ex.tensor(ex.extras?.path);
  return path?.shape.length === 1 && path.shape[0] === rows ? [...path.data] : null;
}

function headMeasureTitle(measure) {
  return hasString(`head.measure.${measure}`) ? translate(`head.measure.${measure}`) : measure.replaceAll('_', ' ');
}

function headExactKey(ex, site, head, measure, box) {
  return `${ex.digest} ${site.id}.${head} ${measure} ${box.join(' ')}`;
}

// The largest cells of the region, best first: [{row, col, value}].
function headStrongest(region, count) {
  const best = [];
  region.values.forEach((value, at) => {
    if (value <= 0 || (best.length === count && value <= best.at(-1).value)) return;
    best.push({ row: Math.floor(at / region.cols), col: at % region.cols, value });
    best.sort((a, b) => b.value - a.value);
    if (best.length > count) best.pop();
  });
  return best;
}

export function mountHead(root, { store, api, current, onExplanation, announce, fail }) {
  const cellId = uniqueId('cell');
  const canvas = element('canvas', { class: 'matrix-canvas', 'aria-hidden': 'true' });
  const spacer = element('div', { class: 'matrix-space', 'aria-hidden': 'true' }, canvas);
  const gridCell = element('div', { role: 'gridcell', id: cellId });
  const gridRow = element('div', { role: 'row', class: 'hidden' }, gridCell);
  const matrix = element('div', {
    class: 'matrix', role: 'grid', tabindex: 0, 'data-widget': 'matrix', 'aria-readonly': 'true', 'aria-activedescendant': cellId,
  }, spacer, gridRow);
  const image = document.createElement('canvas');
  const sitePick = element('select', { onchange: () => store.set({ site: sitePick.value, head: 0, zoom: null }, { push: true }) });
  const headPick = element('select', { onchange: pickHead });
  const measures = element('div', { class: 'segments', role: 'group' });
  const zooms = element('div', { class: 'segments', role: 'group' });
  const visual = element('button', { type: 'button', class: 'plain', onclick: () => store.set({ visual: !store.get().visual }) });
  const offButton = element('button', { type: 'button', class: 'off-toggle', onclick: toggleOff });
  const axes = element('p', { class: 'axes' });
  const readout = element('p', { class: 'cell-readout' });
  const note = element('p', { class: 'quiet', hidden: true });
  const rowTitle = element('h3');
  const bars = element('ol', { class: 'bars' });
  const links = element('div');
  const effect = element('div', { class: 'effect' });
  let table = null;
  let region = null;
  let layout = null;
  let width = 0;
  let exact = null;
  let extra = null;
  let cursor = { row: 0, col: null };
  const results = new Map();

  function pickHead() {
    const chosen = chosenHead(current(), store.get());
    store.set({ site: chosen.site, head: Number(headPick.value), zoom: null }, { push: true });
  }

  // Row and column of the cursor in the region; the column is the row's strongest until one was chosen.
  function position() {
    const state = store.get();
    const rowKey = region.rowAxis.link;
    const colKey = region.colAxis.link === rowKey ? null : region.colAxis.link;
    const row = region.rowOf((rowKey ? state[rowKey] : cursor.row) ?? cursor.row ?? 0);
    let col = region.colOf((colKey ? state[colKey] : cursor.col) ?? -1);
    if (col < 0 && row >= 0) {
      col = 0;
      for (let c = 1; c < region.cols; c++) {
        if (region.values[row * region.cols + c] > region.values[row * region.cols + col]) col = c;
      }
    }
    return { row, col };
  }

  function move(row, col, { push = false } = {}) {
    const patch = {};
    const rowKey = region.rowAxis.link;
    const colKey = region.colAxis.link === rowKey ? null : region.colAxis.link;
    const state = store.get();
    const pick = ([from, to], now) => (now !== null && from <= now && now <= to ? now : from);
    cursor = { row: region.rowRanges[row][0], col: region.colRanges[col][0] };
    if (rowKey) patch[rowKey] = pick(region.rowRanges[row], state[rowKey]);
    if (colKey) patch[colKey] = pick(region.colRanges[col], state[colKey]);
    store.set(patch, { push });
    showPosition();
    scrollToCell(row, col);
    announce(cellText(row, col));
  }

  function cellText(row, col) {
    return translate('head.cell', {
      query: region.rowLabels[row], key: region.colLabels[col], value: formatNumber(valueAt(row, col), 3),
    });
  }

  function valueAt(row, col) {
    return region.values[row * region.cols + col];
  }

  function scrollToCell(row, col) {
    const { left, top, cell } = layout;
    const x = left + col * cell;
    const y = top + row * cell;
    if (x - matrix.scrollLeft < left) matrix.scrollLeft = x - left;
    else if (x + cell - matrix.scrollLeft > matrix.clientWidth) matrix.scrollLeft = x + cell - matrix.clientWidth + 4;
    if (y - matrix.scrollTop < top) matrix.scrollTop = y - top;
    else if (y + cell - matrix.scrollTop > matrix.clientHeight) matrix.scrollTop = y + cell - matrix.clientHeight + 4;
  }

  function paint() {
    if (!region || !layout || !width) return;
    const { row, col } = position();
    const edges = [];
    for (const [, from] of region.segments) if (region.colOf(from) > 0) edges.push(region.colOf(from));
    drawMatrix(canvas, {
      layout, image, row, col,
      rowLabels: region.rowLabels, colLabels: region.colLabels,
      width: matrix.clientWidth, height: matrix.clientHeight,
      scrollX: matrix.scrollLeft, scrollY: matrix.scrollTop,
      colEdges: edges, pooled: region.pooled, path: region.path,
    });
  }

  function arrange() {
    if (!region || !width) return;
    layout = matrixLayout(canvas, region.rowLabels, region.colLabels, width);
    matrix.dataset.cells = `${layout.left} ${layout.top} ${layout.cell}`;
    spacer.style.width = `${Math.max(layout.width, 1)}px`;
    spacer.style.height = `${layout.height}px`;
    const bar = layout.width > width ? 16 : 0;
    matrix.style.height = `${Math.min(layout.height, HEAD_HEIGHT) + bar}px`;
    paintLater(paint);
  }

  function showPosition() {
    const { row, col } = position();
    paintLater(paint);
    if (row < 0) return;
    gridRow.setAttribute('aria-rowindex', row + 1);
    gridCell.setAttribute('aria-colindex', col + 1);
    gridCell.textContent = cellText(row, col);
    showReadout(row, col);
    showRow(row, col);
  }

  function showReadout(row, col) {
    const value = formatNumber(valueAt(row, col), 3);
    readout.replaceChildren(...fill(translate('head.readout'), {
      query: plainText(region.rowLabels[row], region.rowAxis.lang),
      key: plainText(region.colLabels[col], region.colAxis.lang),
      value: element('b', {}, value),
    }));
  }

  function showRow(row, chosen) {
    const values = region.values.subarray(row * region.cols, (row + 1) * region.cols);
    const order = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, HEAD_BARS);
    const total = values.reduce((sum, value) => sum + value, 0);
    const shown = order.reduce((sum, c) => sum + values[c], 0);
    rowTitle.replaceChildren(...fill(translate('head.rowTitle'), { query: quoted(region.rowLabels[row], region.rowAxis.lang) }));
    bars.replaceChildren(...order.map((c) => element('li', { class: c === chosen ? 'is-chosen' : null },
      element('span', { class: 'bar-name' }, plainText(region.colLabels[c], region.colAxis.lang)),
      valueBar(values[c], region.measured === 'weights' ? 1 : region.scale),
      element('span', { class: 'bar-value' }, formatNumber(values[c], 3)))));
    if (region.cols > order.length) {
      bars.append(element('li', { class: 'rest quiet' }, translate('head.rest', {
        count: region.cols - order.length, value: formatNumber(total - shown, 3),
      })));
    }
  }

  function showLinks() {
    const strongest = headStrongest(region, HEAD_LINKS);
    links.replaceChildren(dataTable({
      caption: translate('head.links'),
      className: 'links',
      columns: [{ title: translate('head.link') }, { title: headMeasureTitle(region.measured), number: true }],
      rows: strongest.map(({ row, col, value }) => [
        element('button', { type: 'button', class: 'link', onclick: () => move(row, col, { push: true }) },
          plainText(region.rowLabels[row], region.rowAxis.lang), ' ← ', plainText(region.colLabels[col], region.colAxis.lang)),
        formatNumber(value, 3),
      ]),
    }));
  }

  // How much each input token or set element counted, where the model has such weights.
  function importance(ex) {
    const name = Object.keys(ex.extras ?? {}).find((each) => each.endsWith('_importance'));
    const tensor = name && ex.tensor(ex.extras[name]);
    if (!tensor) return null;
    const most = headMost(tensor.data);
    const order = [...tensor.data.keys()].sort((a, b) => tensor.data[b] - tensor.data[a]).slice(0, HEAD_LINKS);
    return element('div', {}, element('h3', {}, headMeasureTitle(name)), element('ol', { class: 'bars' }, order.map((i) => element('li', {},
      element('span', { class: 'bar-name' }, plainText(ex.source.tokens[i] ? tokenLabel(ex.source.tokens[i]) : String(i + 1), ex.source.lang)),
      valueBar(tensor.data[i], most),
      element('span', { class: 'bar-value' }, formatNumber(tensor.data[i], 3))))));
  }

  // Everything about the chosen head; `exact` values of a pooled region come in later.
  function show() {
    const ex = current();
    const state = store.get();
    const chosen = ex && chosenHead(ex, state);
    if (!chosen) return;
    const site = ex.site(chosen.site);
    region = headRegion(ex, { ...state, site, head: chosen.head, extra, exact });
    if (!region) return;
    paintImage(image, cellImage(region.values, 0, region.rows, region.cols, { scale: region.scale, signed: region.signed }));
    setAttributes(matrix, { 'aria-rowcount': region.rows, 'aria-colcount': region.cols,
      'aria-label': translate('head.matrix', { name: headName(chosen.site, chosen.head), rows: region.rowAxis.title, columns: region.colAxis.title }) });
    showControls(ex, state, site, chosen.head);
    paintLater(arrange);
    showPosition();
    showLinks();
    table?.refresh();
    fetchExact(ex, site, chosen.head);
  }

  function showControls(ex, state, site, head) {
    sitePick.value = site.id;
    if (headPick.length !== site.heads) {
      headPick.replaceChildren(...Array.from({ length: site.heads }, (_, h) => element('option', { value: h }, String(h))));
    }
    headPick.value = head;
    const some = Boolean(ex.tensor(site.contribution));
    const choose = (name) => {
      extra = headExtras(ex, site).includes(name) ? name : null;
      if (!extra) store.set({ measure: name });
      show();
    };
    measures.replaceChildren(...['weights', 'contribution', ...headExtras(ex, site)].map((measure) => element('button', {
      type: 'button', 'aria-pressed': region.measured === measure, disabled: measure === 'contribution' && !some,
      onclick: () => choose(measure),
    }, headMeasureTitle(measure))));
    measures.setAttribute('aria-label', translate('head.measure'));
    const whole = !state.zoom;
    zooms.setAttribute('aria-label', translate('head.zoom'));
    zooms.replaceChildren(
      element('button', { type: 'button', 'aria-label': translate('head.zoomIn'), onclick: () => zoom(0.5), disabled: region.rows < 5 && region.cols < 5 }, '+'),
      element('button', { type: 'button', 'aria-label': translate('head.zoomOut'), onclick: () => zoom(2), disabled: whole }, '−'),
      element('button', { type: 'button', onclick: () => store.set({ zoom: null }), disabled: whole }, translate('head.whole')));
    visual.textContent = translate('head.visual');
    visual.hidden = region.colAxis.dir !== 'rtl';
    visual.setAttribute('aria-pressed', String(state.visual));
    const name = headName(site.id, head);
    const isOff = state.off.includes(name);
    offButton.textContent = translate(isOff ? 'head.switchOn' : 'head.switchOff', { name });
    offButton.setAttribute('aria-pressed', String(isOff));
    const arrow = (text) => element('span', { class: 'arrow', 'aria-hidden': 'true' }, text);
    axes.replaceChildren(
      element('span', {}, arrow('↓ '), translate('head.rows', { axis: region.rowAxis.title })),
      element('span', {}, arrow('→ '), translate('head.columns', { axis: region.colAxis.title })),
      ...region.segments.map(([segment, from, to]) => element('span', {}, translate('head.segment', { segment, from: from + 1, to }))));
    const notes = [
      region.measured === 'contribution' ? translate('head.contributionNote') : '',
      state.measure === 'contribution' && !some ? translate('head.noContribution') : '',
      region.pooled ? translate(api ? 'head.pooledServed' : 'head.pooled', { rows: region.rows, columns: region.cols, queries: region.queries, keys: region.keys }) : '',
      site.sum === 'sub' ? translate('head.sub') : '',
      site.sum === 'none' ? translate('head.none') : '',
    ].filter(Boolean);
    note.textContent = notes.join(' ');
    note.hidden = !notes.length;
  }

  // Half or double the region around the cursor.
  function zoom(factor) {
    const [q0, q1, k0, k1] = region.box;
    const { row, col } = position();
    const part = (low, high, count, middle) => {
      const size = Math.max(4, Math.min(count, Math.round((high - low + 1) * factor)));
      const from = Math.max(0, Math.min(count - size, Math.round(middle - size / 2)));
      return [from, Math.min(count - 1, from + size - 1)];
    };
    const rows = part(q0, q1, region.queries, region.rowRanges[Math.max(0, row)][0]);
    const cols = part(k0, k1, region.keys, region.colRanges[Math.max(0, col)][0]);
    const all = rows[1] - rows[0] + 1 >= region.queries && cols[1] - cols[0] + 1 >= region.keys;
    store.set({ zoom: all ? null : [...rows, ...cols] });
  }

  async function fetchExact(ex, site, head) {
    const [q0, q1, k0, k1] = region.box;
    if (!api || !region.pooled || !store.get().zoom || q1 - q0 >= HEAD_EXACT || k1 - k0 >= HEAD_EXACT) return;
    const key = headExactKey(ex, site, head, region.measured, region.box);
    try {
      const name = region.measured === 'contribution' ? site.contribution : site.tensor;
      const { data } = await api.tensor(name, head, [q0, q1], [k0, k1]);
      if (data.length !== (q1 - q0 + 1) * (k1 - k0 + 1)) return;
      exact = { key, data };
      if (current() === ex) show();
    } catch (error) {
      fail(error);
    }
  }

  function toggleOff() {
    const chosen = chosenHead(current(), store.get());
    const name = headName(chosen.site, chosen.head);
    const { off } = store.get();
    const isOff = off.includes(name);
    store.set({ site: chosen.site, head: chosen.head, off: isOff ? off.filter((each) => each !== name) : [...off, name] }, { push: true });
    announce(translate(isOff ? 'heads.saidOn' : 'heads.saidOff', { name }));
  }

  function offKey(off) {
    return [...off].sort().join(',');
  }

  // What the model does without the heads that are off, or without `part` (a memory, a seed): stored in a
  // file, asked of the model when served.
  function showEffect(part = null) {
    const ex = current();
    const off = part ? [part] : store.get().off;
    const chosen = chosenHead(ex, store.get());
    const names = off.length ? off : chosen ? [headName(chosen.site, chosen.head)] : [];
    const show = (...children) => effect.replaceChildren(
      element('h3', {}, off.length ? translate('head.without', { heads: names.join(', ') }) : translate('head.effectTitle')), ...children, partButtons(ex));
    const known = names.length === 1 ? ex.headSummary(names[0])?.effect?.exact ?? null : null;
    const sum = names.reduce((total, name) => total + (ex.headSummary(name)?.effect?.estimate ?? NaN), 0);
    const guess = known !== null ? translate('head.exactIs', { change: formatChange(known) })
      : Number.isNaN(sum) ? '' : translate('head.estimateIs', { change: formatChange(sum) });
    if (!off.length) {
      show(element('p', {}, `${guess} ${known === null ? translate('head.hint') : ''}`));
      return;
    }
    const key = `${ex.digest} ${offKey(off)}`;
    const result = results.get(key) ?? ex.ablations?.[offKey(off)] ?? ex.ablations?.[off.join(',')];
    if (result && !(result instanceof Promise)) {
      show(...resultParts(ex, result));
    } else if (!api) {
      show(element('p', {}, guess), element('p', { class: 'quiet' }, translate('head.needsModel')),
        element('pre', { class: 'command', tabindex: 0 }, explainCommand(ex, off.length === 1 ? ['--ablations', off[0]] : ['--off', off.join(',')])));
    } else {
      show(element('p', {}, guess), element('p', { class: 'quiet', role: 'status' }, translate('head.computing')));
      if (!result) results.set(key, ask(ex, off, key, part));
    }
  }

  async function ask(ex, off, key, part) {
    const isWanted = () => current() === ex && (part || offKey(store.get().off) === offKey(off));
    try {
      const answer = await api.off([...off]);
      results.set(key, answer);
      const head = off.length === 1 ? ex.headSummary(off[0]) : null;
      if (head) head.effect = { ...head.effect, exact: answer.sum_change };
      if (isWanted()) {
        showEffect(part);
        announce(translate('head.exactIs', { change: formatChange(answer.sum_change) }));
      }
    } catch (error) {
      results.delete(key);
      fail(error);
      if (isWanted()) effect.lastElementChild.replaceWith(element('p', {}, translate('page.failed', { error: error.message })));
    }
  }

  function partButtons(ex) {
    const parts = (ex.model?.off_switches ?? []).filter((name) => api || ex.ablations?.[name]);
    return parts.length ? element('div', { class: 'row', role: 'group', 'aria-label': translate('head.parts') }, parts.map((name) =>
      element('button', { type: 'button', onclick: () => showEffect(name) }, translate('head.partOff', { name })))) : '';
  }

  function resultParts(ex, result) {
    const before = ex.score?.sum;
    const after = result.score?.sum;
    const tokens = ex.target.tokens;
    const most = Math.max(0.01, ...result.effect.map(Math.abs));
    const target = result.target ?? null;
    const parts = [element('p', { class: 'lead' }, fill(translate('head.exactSentence'), {
      change: element('b', {}, formatChange(result.sum_change)),
    }))];
    if (target?.tokens) {
      const { marks } = compareTokens(tokens.map((token) => token.id), target.tokens.map((token) => token.id));
      const changed = marks.filter((mark) => mark !== 'kept').length;
      parts.push(
        element('dl', { class: 'versus' },
          element('div', {}, element('dt', {}, translate('head.before')), element('dd', {}, plainText(ex.target.text, ex.target.lang), ' ', element('span', { class: 'quiet' }, formatNumber(before)))),
          element('div', {}, element('dt', {}, translate('head.after')), element('dd', {}, markedText(target, marks), ' ', element('span', { class: 'quiet' }, formatNumber(after))))),
        element('p', { class: 'quiet' }, changed
          ? translate('head.changed', { changed, all: marks.length }) : translate('head.unchanged')));
    } else if (typeof result.text === 'string') {
      parts.push(element('p', {}, plainText(result.text, ex.target.lang)));
    }
    parts.push(scrollRegion(translate('head.effects'), dataTable({
      caption: translate('head.effects'),
      className: 'effects',
      columns: [{ title: translate('head.token') }, { title: translate('head.change'), number: true }, { title: '', className: 'bar-cell' }],
      rows: result.effect.map((change, t) => [
        plainText(tokens[t] ? tokenLabel(tokens[t]) : String(t + 1), ex.target.lang),
        formatChange(change),
        valueBar(change, most, true),
      ]),
    })));
    return parts;
  }

  // The new text with what is different marked, by underline and for screen readers.
  function markedText(side, marks) {
    const run = element('bdi', { class: 'run', dir: side.dir || 'auto', lang: side.lang || null });
    let at = 0;
    tokenRanges(side).forEach(([start, end], i) => {
      if (end <= start) return;
      run.append(side.text.slice(at, start));
      const text = side.text.slice(start, end);
      run.append(marks[i] === 'kept' ? text : element('ins', { class: marks[i], title: translate(`head.mark.${marks[i]}`) }, text));
      at = end;
    });
    run.append(side.text.slice(at));
    return run;
  }

  function buildTable() {
    const chosen = chosenHead(current(), store.get());
    return matrixTable({
      caption: headTitle(current(), headName(chosen.site, chosen.head)),
      corner: `${region.rowAxis.title} ↓ ${region.colAxis.title} →`,
      rowLabels: region.rowLabels,
      colLabels: region.colLabels,
      value: valueAt,
    });
  }

  function eventCell(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    if (!layout || x < layout.left || y < layout.top) return null;
    const col = Math.floor((x - layout.left + matrix.scrollLeft) / layout.cell);
    const row = Math.floor((y - layout.top + matrix.scrollTop) / layout.cell);
    return row < region.rows && col < region.cols ? { row, col } : null;
  }

  matrix.addEventListener('scroll', paint);
  matrix.addEventListener('pointermove', (event) => {
    const at = region && eventCell(event);
    if (at) showReadout(at.row, at.col);
  });
  matrix.addEventListener('pointerleave', () => {
    if (!region) return;
    const { row, col } = position();
    if (row >= 0) showReadout(row, col);
  });
  matrix.addEventListener('click', (event) => {
    const at = region && eventCell(event);
    if (at) move(at.row, at.col, { push: true });
  });
  matrix.addEventListener('keydown', (event) => {
    if (!region || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = position();
    const [row, col] = [Math.max(0, now.row), Math.max(0, now.col)];
    const to = {
      ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1], ArrowUp: [row - 1, col], ArrowDown: [row + 1, col],
      Home: [row, 0], End: [row, region.cols - 1], PageUp: [Math.max(0, row - 10), col], PageDown: [Math.min(region.rows - 1, row + 10), col],
    }[event.key];
    const action = {
      '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), ' ': toggleOff, d: () => table.toggle(!table.isOpen()),
    }[event.key];
    if (!to && !action) return;
    event.preventDefault();
    if (action) action();
    else if (to[0] >= 0 && to[0] < region.rows && to[1] >= 0 && to[1] < region.cols) move(...to);
  });
  new ResizeObserver(() => {
    if (Math.abs(matrix.clientWidth - width) < 1) return;
    width = matrix.clientWidth;
    arrange();
  }).observe(matrix);

  onExplanation((ex) => {
    const groups = [...new Set(ex.sites.map((each) => each.group))];
    sitePick.replaceChildren(...groups.map((group) => element('optgroup', { label: groupTitle(group) },
      ex.sites.filter((each) => each.group === group && each.tensor).map((each) =>
        element('option', { value: each.id }, translate('head.layer', { layer: each.layer, name: each.id }))))));
    exact = null;
    extra = null;
    cursor = { row: 0, col: null };
    table = tableToggle(translate('head.tableName'), buildTable);
    table.button.setAttribute('aria-keyshortcuts', 'd');
    root.replaceChildren(
      element('div', { class: 'controls' },
        element('label', { class: 'field' }, element('span', {}, translate('head.site')), sitePick),
        element('label', { class: 'field' }, element('span', {}, translate('head.number')), headPick),
        measures, offButton),
      element('div', { class: 'head-layout' },
        element('div', {}, axes, matrix, element('div', { class: 'controls below' }, readout, zooms, visual, table.button), note, table.host, effect),
        element('div', { class: 'head-side' }, element('div', {}, rowTitle, bars), importance(ex), links)));
    show();
    showEffect();
  });
  store.subscribe((state, changed) => {
    if (!current() || !table) return;
    const any = (...keys) => keys.some((key) => changed.has(key));
    if (any('site', 'head', 'measure', 'zoom', 'visual', 'off') || (changed.has('step') && state.site === null)) {
      show();
      if (any('site', 'head', 'off') || state.site === null) showEffect();
    } else if (any('step', 'src') && region) showPosition();
  });
  onTheme(() => {
    if (current() && table) show();
  });
}

addStrings(
  {
    'head.site': 'Layer',
    'head.number': 'Head',
    'head.layer': 'layer {layer} ({name})',
    'head.matrix': 'Matrix of head {name}: rows are {rows}, columns are {columns}. Arrow keys move, D shows the table.',
    'head.tableName': 'Numbers of the matrix',
    'head.rows': 'rows: {axis} (each reads)',
    'head.columns': 'columns: {axis} (is read)',
    'head.segment': '{segment}: {from} to {to}',
    'head.cell': '{query} reads {key}: {value}',
    'head.readout': '{query} ← {key} {value}',
    'head.rowTitle': 'What {query} reads',
    'head.rest': '{count} others together: {value}',
    'head.links': 'Strongest links',
    'head.link': 'Token ← what it reads',
    'head.measure': 'What the cells show',
    'head.measure.weights': 'Weights',
    'head.measure.contribution': 'Contribution',
    'head.measure.p_choose': 'Choosing probability',
    'head.measure.covered': 'Covered so far',
    'head.measure.energy': 'Energy',
    'head.measure.word_importance': 'Importance of words',
    'head.measure.element_importance': 'Importance of elements',
    'head.parts': 'Other parts that can be switched off',
    'head.partOff': 'Try without {name}',
    'head.contributionNote': 'Contribution: length of weight × value × output projection, which a large weight on a small value does not have.',
    'head.noContribution': 'Contributions of this layer are not stored here; weights are shown.',
    'head.zoom': 'Zoom',
    'head.zoomIn': 'Zoom in at the cursor',
    'head.zoomOut': 'Zoom out',
    'head.whole': 'Whole',
    'head.visual': 'Visual order',
    'head.pooled': 'The text is long: {queries} × {keys} cells are pooled to {rows} × {columns}; a cell is the weight from a group to a group.',
    'head.pooledServed': 'The text is long: {queries} × {keys} cells are pooled to {rows} × {columns}. Zoom in to see every token.',
    'head.sub': 'Rows of this attention sum to at most 1: the rest was not read at all.',
    'head.none': 'Rows of this attention do not sum to 1.',
    'head.switchOff': 'Switch {name} off',
    'head.switchOn': 'Switch {name} on',
    'head.effectTitle': 'What the model would do without it',
    'head.without': 'Without {heads}',
    'head.estimateIs': 'Estimate: the output’s log-probability would change by about {change}.',
    'head.exactIs': 'Without it the output’s log-probability changes by {change}.',
    'head.exactSentence': 'The log-probability of this output changes by {change}.',
    'head.hint': 'Switch the head off to see what the model does without it.',
    'head.computing': 'Translating again without it…',
    'head.needsModel': 'This file does not hold that run. With the model at hand, this computes it:',
    'head.before': 'with',
    'head.after': 'without',
    'head.changed': '{changed} of {all} tokens of the new translation are different.',
    'head.unchanged': 'The translation stays the same, word for word.',
    'head.mark.changed': 'changed',
    'head.mark.new': 'new',
    'head.effects': 'Change of log-probability of each token',
    'head.token': 'Token',
    'head.change': 'Change',
  },
  {
    'head.site': '层',
    'head.number': '头',
    'head.layer': '第 {layer} 层（{name}）',
    'head.matrix': '头 {name} 的矩阵：行是{rows}，列是{columns}。方向键移动，D 显示表格。',
    'head.tableName': '矩阵的数字',
    'head.rows': '行：{axis}（读取者）',
    'head.columns': '列：{axis}（被读取）',
    'head.segment': '{segment}：{from} 到 {to}',
    'head.cell': '{query} 读取 {key}：{value}',
    'head.readout': '{query} ← {key} {value}',
    'head.rowTitle': '{query} 读取什么',
    'head.rest': '其余 {count} 个合计：{value}',
    'head.links': '最强的连接',
    'head.link': '词元 ← 它读取的',
    'head.measure': '格子的含义',
    'head.measure.weights': '权重',
    'head.measure.contribution': '贡献',
    'head.measure.p_choose': '选择概率',
    'head.measure.covered': '已覆盖',
    'head.measure.energy': '能量',
    'head.measure.word_importance': '词的重要性',
    'head.measure.element_importance': '元素的重要性',
    'head.parts': '其他可以关闭的部分',
    'head.partOff': '试试没有 {name}',
    'head.contributionNote': '贡献：权重 × 值 × 输出投影的长度；大权重落在小的值上时，贡献仍然小。',
    'head.noContribution': '这里没有存这一层的贡献，显示的是权重。',
    'head.zoom': '缩放',
    'head.zoomIn': '在光标处放大',
    'head.zoomOut': '缩小',
    'head.whole': '全部',
    'head.visual': '视觉顺序',
    'head.pooled': '文本较长：{queries} × {keys} 个格子合并为 {rows} × {columns}；一个格子是一组到一组的权重。',
    'head.pooledServed': '文本较长：{queries} × {keys} 个格子合并为 {rows} × {columns}。放大可看到每个词元。',
    'head.sub': '这种注意力每行的和不超过 1：其余部分没有读取。',
    'head.none': '这种注意力每行的和不是 1。',
    'head.switchOff': '关闭 {name}',
    'head.switchOn': '打开 {name}',
    'head.effectTitle': '没有它，模型会怎样',
    'head.without': '没有 {heads}',
    'head.estimateIs': '估计：输出的对数概率约变化 {change}。',
    'head.exactIs': '没有它，输出的对数概率变化 {change}。',
    'head.exactSentence': '这个输出的对数概率变化 {change}。',
    'head.hint': '关闭这个头，看看没有它模型会怎样。',
    'head.computing': '正在不用它重新翻译…',
    'head.needsModel': '这个文件没有存这次计算。有模型时，用下面的命令计算：',
    'head.before': '有',
    'head.after': '没有',
    'head.changed': '新译文的 {all} 个词元中有 {changed} 个不同。',
    'head.unchanged': '译文一字不变。',
    'head.mark.changed': '改变',
    'head.mark.new': '新增',
    'head.effects': '每个词元对数概率的变化',
    'head.token': '词元',
    'head.change': '变化',
  },
);
