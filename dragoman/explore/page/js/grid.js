// All heads at a glance: one thumbnail each, in groups, sorted and filtered by what was computed about them.
import { make, setAttributes, setChildren } from './dom.js';
import { tilePicture } from './draw.js';
import { addTexts, formatChange, formatNumber, hasString, translate } from './i18n.js';
import { rovingFocus } from './keys.js';
import { clamp, fillGroup, hasModifier, joinTexts, makeField } from './parts.js';
import { headName, parseHead } from './state.js';
import { dataTable, tableToggle } from './table.js';
import { onTheme } from './theme.js';

addTexts('group', {
  encoder: ['Encoder self-attention', '编码器自注意力'],
  decoder: ['Decoder self-attention', '解码器自注意力'],
  cross: ['Cross-attention', '交叉注意力'],
  pool: ['Attention pooling', '注意力池化'],
});
const headsText = addTexts('heads', {
  name: ['{group}, layer {layer}, head {head} ({name})', '{group}，第 {layer} 层，第 {head} 头（{name}）'],
  sort: ['Sort by', '排序'],
  'sort.layer': ['Layer', '层'],
  'sort.effect': ['Effect', '影响'],
  'sort.entropy': ['Entropy', '熵'],
  'sort.label': ['Label', '标签'],
  filter: ['Show', '显示'],
  'filter.all': ['all heads', '所有头'],
  count: ['{count} heads are labelled “{label}”.', '有 {count} 个头的标签是“{label}”。'],
  isOff: ['off', '已关闭'],
  saidOn: ['Head {name} is on.', '头 {name} 已打开。'],
  saidOff: ['Head {name} is off.', '头 {name} 已关闭。'],
  most: ['most', '最大'],
  'legend.weights': ['attention weight', '注意力权重'],
  'legend.contribution': ['size of what the head adds', '这个头所加向量的大小'],
  entropy: ['entropy {value} nats', '熵 {value} 奈特'],
  distance: ['mean distance {value} tokens', '平均距离 {value} 个词元'],
  exact: ['When off, the output’s log-probability changes by {change}', '关闭后输出的对数概率变化 {change}'],
  estimate: ['When off, the output’s log-probability changes by about {change} (estimate)', '关闭后输出的对数概率约变化 {change}（估计）'],
  'exact@sets': ['When off, the output changes by {change}', '关闭后输出变化 {change}'],
  'estimate@sets': ['When off, the output changes by about {change} (estimate)', '关闭后输出约变化 {change}（估计）'],
  effects: ['Measure every effect', '测量所有头的影响'],
  effectsDone: ['{done} of {all} heads', '{all} 个头中已完成 {done} 个'],
  effectsReady: ['Every effect was measured.', '所有头的影响都已测量。'],
  noLabel: ['No label', '没有标签'],
  noLabelMeans: ['No label: fits no known pattern on this sentence.', '没有标签：在这个句子上不符合任何已知模式。'],
  tableCaption: ['All heads with their labels and measures', '所有头及其标签和度量'],
  'column.head': ['Head', '头'],
  'column.labels': ['Labels with scores', '标签与得分'],
  'column.entropy': ['Entropy, nats', '熵（奈特）'],
  'column.distance': ['Mean distance', '平均距离'],
  'column.effect': ['Effect when off', '关闭后的影响'],
});
// Labels as "name: meaning".
addTexts('label', {
  offset: ['offset: in most rows the largest weight is this many tokens before or after the query', '偏移：多数行中最强的格子在这么多词元之前或之后'],
  sink: ['sink: half of the weight or more is on special tokens or the first token', '汇聚：至少一半权重在特殊词元或第一个词元上'],
  end: ['end: half of the weight or more is on the last token', '句末：至少一半权重在最后一个词元上'],
  same_token: ['same token: reads other occurrences of the token', '相同词元：读取同一词元的其他位置'],
  same_word: ['same word: reads the other subwords of the word', '同一个词：读取同一个词的其他子词'],
  punctuation: ['punctuation: most of the weight is on punctuation', '标点：大部分权重在标点上'],
  rare: ['rare: most of the weight is on rare tokens', '罕见词：大部分权重在罕见词元上'],
  align: ['align: in most rows its strongest source token is the attribution’s', '对齐：多数行中最强的原文词元与归因一致'],
  monotonic: ['monotonic: reads the source in the order of the target', '单调：按译文的顺序读原文'],
  broad: ['broad: spreads its weight over nearly everything', '分散：权重几乎分散到所有词元'],
  focused: ['focused: puts its weight on very few tokens', '集中：权重集中在很少的词元上'],
  dead: ['dead: adds less than 1 % of what its layer’s heads add', '失效：所加的不到本层各头总和的 1 %'],
});

const GRID_SIDE = 50; // pixels of a map, as wide as its cell
const GRID_ACROSS = 16; // maps in a row of the picture
const gridScales = new WeakMap();
const whenIdle = globalThis.requestIdleCallback ?? ((task) => setTimeout(task, 99, { didTimeout: true }));

// Largest size of a matrix's values; attention weights always go from 0 to 1.
export function matrixScale(matrix, measure) {
  if (measure === 'weights') return 1;
  if (!gridScales.has(matrix)) gridScales.set(matrix, matrix.data.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1);
  return gridScales.get(matrix);
}

// The selected head, or the one that a person would want to see first: {site, head, name}.
export function chosenHead(ex, { site, head, step }) {
  if (ex.site(site)) return { site, head, name: headName(site, head) };
  const first = ex.sites.find((each) => each.tensor)?.id;
  return ex.strongestHead(step ?? 0) ?? (first ? { site: first, head: 0, name: headName(first, 0) } : null);
}

// Switch a head off, or on again; `patch` is what else changes.
export function switchHead(name, { store, announce }, patch) {
  const { off } = store.get();
  const isOff = off.includes(name);
  store.set({ ...patch, off: isOff ? off.filter((each) => each !== name) : [...off, name] }, { push: true });
  announce(translate(isOff ? 'heads.saidOn' : 'heads.saidOff', { name }));
}

// "decoder self-attention" and the like, as it stands over a group and in names.
export const siteGroup = ({ kind, group }) => (kind === 'pool' ? kind : group);

export const groupTitle = (group) => translate(`group.${group}`);

export function headTitle(ex, name) {
  const [id, head] = parseHead(name);
  const site = ex.site(id);
  return headsText('name', { group: groupTitle(siteGroup(site)), layer: site.layer, head, name });
}

// What is known of a head's effect: {exact, estimate}, each null where it was not computed.
export function effectText(effect) {
  const kind = ['exact', 'estimate'].find((each) => Number.isFinite(effect?.[each]));
  return kind ? headsText(kind, { change: formatChange(effect[kind]) }) : '';
}

// A label's name and meaning in the page's language: "offset −1" keeps its number.
function gridLabel(label) {
  const [, kind, number = ''] = /^(.*?)( [-+]?\d+)?$/.exec(label);
  const key = `label.${kind.replace(' ', '_')}`;
  const [title, meaning = ''] = hasString(key) ? translate(key).split(/: |：/) : [kind];
  return { title: title + number.replace('-', '−'), meaning };
}

const gridLabels = (summary) => [...summary?.labels ?? []].sort((a, b) => b[1] - a[1]);

const gridLabelTexts = (summary) => gridLabels(summary).map(([label, score]) => `${gridLabel(label).title} ${formatNumber(score)}`).join(', ');

const gridHeads = (ex) => ex.sites.filter((site) => site.tensor).flatMap((site) => Array.from({ length: site.heads }, (_, head) => {
  const name = headName(site.id, head);
  return { name, site, summary: ex.headSummary(name) };
}));

// Heads by group: [{title, rows: [{title, heads, value}]}] in the order that the state asks for.
function gridGroups(ex, { sort, label: wanted }) {
  const heads = gridHeads(ex).filter(({ summary }) => !wanted || gridLabels(summary).some(([label]) => label === wanted));
  // One row, by the number of each head; without a number it comes last.
  const sorted = (list, number, format) => {
    const value = (each) => number(each) ?? Infinity;
    return [{ heads: list.sort((a, b) => value(a) - value(b)), value: format && ((each) => format(number(each))) }];
  };
  if (sort === 'label') {
    const score = (each, label) => gridLabels(each.summary).find(([name]) => name === label)?.[1] ?? 0;
    const groups = Object.groupBy(heads, ({ summary }) => wanted || (gridLabels(summary)[0]?.[0] ?? ''));
    return Object.keys(groups).sort((a, b) => !a - !b || a.localeCompare(b)).map((label) => ({
      title: label ? gridLabel(label).title : headsText('noLabel'),
      rows: sorted(groups[label], (each) => -score(each, label), label && ((number) => formatNumber(-number))),
    }));
  }
  return ['encoder', 'decoder', 'cross', 'pool'].map((group) => {
    const list = heads.filter(({ site }) => siteGroup(site) === group);
    const rows = {
      layer: () => Object.entries(Object.groupBy(list, ({ site }) => site.id)).map(([title, each]) => ({ title, heads: each })),
      effect: () => sorted(list, ({ name }) => ex.headEffect(name), formatChange),
      entropy: () => sorted(list, ({ summary }) => summary?.entropy, formatNumber),
    }[sort]();
    return list.length && { title: groupTitle(group), rows };
  }).filter(Boolean);
}

// The nearest cell above or below another: its row counts more than its column.
function gridNext(cells, from, isDown) {
  const here = from.getBoundingClientRect();
  const [next] = cells.map((cell) => {
    const { left, top, bottom } = cell.getBoundingClientRect();
    const away = isDown ? top - here.bottom : here.top - bottom;
    return { cell, away, cost: 4 * away + Math.abs(left - here.left) };
  }).filter(({ away }) => away >= -1).sort((a, b) => a.cost - b.cost);
  return next?.cell;
}

export function mountGrid(root, { store, api, current, onExplanation, announce, fail, visit }) {
  const sorts = make('div.segments');
  const filter = make('select', { onchange: () => store.set({ label: filter.value }) });
  const effects = make('button.plain', { onclick: measureAll });
  const board = make('div', {
    role: 'group',
    'data-widget': 'heads',
    onclick: ({ target }) => {
      const name = nameOf(target);
      if (!name) return;
      const [site, head] = parseHead(name);
      store.set({ site, head, zoom: null }, { push: true });
      read(name);
    },
    ondblclick: ({ target }) => nameOf(target) && visit('head'),
    onpointerover: ({ target }) => read(nameOf(target)),
    onpointerleave: () => read(),
    onfocusin: ({ target }) => read(nameOf(target)),
    onfocusout: () => read(),
    onkeydown: (event) => {
      const cell = event.target;
      if (hasModifier(event) || ![' ', 'ArrowDown', 'ArrowUp'].includes(event.key)) return;
      event.preventDefault();
      if (event.key === ' ') switchHead(nameOf(cell), { store, announce });
      else roving.focus(gridNext([...cells.values()], cell, event.key === 'ArrowDown'));
    },
  });
  const readout = make('div.head-read', { id: 'head-read' });
  const legend = make('p.ramp-legend', { 'aria-hidden': true });
  const count = make('p.quiet', { role: 'status' });
  let cells = new Map(); // by the head's name
  let table = null;
  let filled = null; // the explanation whose heads the cells are
  let pointed = null;
  let picture = null; // the maps of all heads, in the order of `names`
  let names = [];
  let done = 0; // maps that are drawn
  let idle = 0;

  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets.push(sheet);
  addEventListener('beforeprint', () => drawRest({ didTimeout: true }));
  const roving = rovingFocus(board, { items: () => [...cells.values()] });

  function nameOf(target) {
    return target.closest('.head-cell')?.dataset.head;
  }

  function focusedName() {
    return board.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  }

  function draw(index) {
    const [id, head] = parseHead(names[index]);
    const { measure } = store.get();
    const own = filled.siteMatrix(id, measure);
    const matrix = own ?? filled.siteMatrix(id, 'weights');
    const [, rows, cols] = matrix.shape;
    picture.paint(index, matrix.data, head * rows * cols, rows, cols, matrixScale(matrix, own ? measure : 'weights'));
  }

  // Draw while nothing else is to do, then show all maps at once.
  function drawRest(deadline) {
    idle = 0;
    while (done < names.length && (deadline.didTimeout || deadline.timeRemaining() >= 2)) draw(done++);
    if (done < names.length) drawLater();
    else if (filled) sheet.replaceSync(`.head-cell i{background-image:url(${picture.address()})}`);
  }

  function drawLater() {
    idle ||= whenIdle(drawRest, { timeout: 100 });
  }

  function redraw() {
    done = 0;
    drawLater();
  }

  // What is known about the head under the pointer, in focus or selected.
  function read(name = null) {
    const ex = current();
    if (!ex) return;
    pointed = name;
    const shown = name ?? focusedName() ?? chosenHead(ex, store.get())?.name;
    if (!shown) return;
    const summary = ex.headSummary(shown);
    const facts = [
      effectText(summary?.effect),
      ...[['entropy', 2], ['distance', 1]].map(([key, digits]) => Number.isFinite(summary?.[key])
        && headsText(key, { value: formatNumber(summary[key], digits) })),
    ].filter(Boolean);
    const labels = gridLabels(summary).map(([label, score]) => {
      const { title, meaning } = gridLabel(label);
      return make('li', make('span.tag', `${title} `, make('b', formatNumber(score))), ' ', meaning);
    });
    setChildren(readout,
      make('p.read-title', headTitle(ex, shown)),
      make('p.read-facts', facts.map((fact) => make('span', fact))),
      labels.length ? make('ul.labels', labels) : make('p.quiet', headsText('noLabelMeans')));
  }

  // Selected and off heads; names are made anew where something changed, or everywhere.
  function mark(all = false) {
    const ex = current();
    const { off } = store.get();
    const chosen = chosenHead(ex, store.get())?.name;
    for (const [name, cell] of cells) {
      const isOff = off.includes(name);
      if (all || isOff !== cell.classList.contains('is-off')) {
        const summary = ex.headSummary(name);
        const words = joinTexts([headTitle(ex, name), isOff && headsText('isOff'), gridLabelTexts(summary)], ', ');
        cell.classList.toggle('is-off', isOff);
        cell.ariaLabel = joinTexts([words, effectText(summary?.effect)], '. ');
      }
      if ((name === chosen) !== cell.hasAttribute('aria-current')) setAttributes(cell, { 'aria-current': name === chosen || null });
    }
    if (!focusedName()) roving.refresh(cells.get(chosen));
    if (!pointed) read();
  }

  function fill() {
    const ex = current();
    const state = store.get();
    const focused = focusedName();
    if (filled !== ex) {
      filled = ex;
      names = gridHeads(ex).map((each) => each.name);
      picture = tilePicture(names.length, GRID_SIDE, GRID_ACROSS);
      setAttributes(board, { var: { rows: Math.ceil(names.length / GRID_ACROSS) } });
      sheet.replaceSync('');
      redraw();
    }
    cells = new Map();
    const makeCell = (each, value) => {
      const at = names.indexOf(each.name);
      const cell = make('button.head-cell', { tabindex: -1, 'data-head': each.name, 'aria-describedby': 'head-read' },
        make('i', { 'aria-hidden': true, var: { x: at % GRID_ACROSS, y: Math.floor(at / GRID_ACROSS) } }),
        value && make('span.head-value', value(each)));
      cells.set(each.name, cell);
      return cell;
    };
    board.className = `heads-board by-${state.sort}`;
    setChildren(board, gridGroups(ex, state).map(({ title, rows }) => make('div.heads-group',
      make('h3', title, ' ', make('span.quiet', rows.flatMap((row) => row.heads).length)),
      rows.map((row) => make('div.heads-row', { var: { per: clamp(row.heads.length, 4, 8) } },
        row.title && make('span.row-title', { 'aria-hidden': true }, row.title),
        make('div.heads-cells', row.heads.map((each) => makeCell(each, row.value))))))));
    count.textContent = state.label ? headsText('count', { count: cells.size, label: gridLabel(state.label).title }) : '';
    mark(true);
    if (focused) roving.focus(cells.get(focused));
    table.refresh();
  }

  function fillControls() {
    const { sort, label, measure } = store.get();
    const name = headsText('sort');
    fillGroup(sorts, name, ['layer', 'effect', 'entropy', 'label'].map((each) =>
      [headsText(`sort.${each}`), { 'aria-pressed': sort === each, onclick: () => store.set({ sort: each }) }],
    ), make('span.segments-name', { 'aria-hidden': true }, name));
    filter.value = label;
    if (filter.selectedIndex < 0) filter.value = '';
    setChildren(legend, '0', make('span.ramp'), measure === 'weights' ? '1' : headsText('most'),
      ' ', headsText(`legend.${measure}`));
  }

  async function measureAll() {
    const ex = current();
    effects.disabled = true;
    let done = 0;
    try {
      await api.effects((name, exact) => {
        const head = ex.headSummary(name);
        if (head) head.effect.exact = exact;
        done += 1;
        effects.textContent = headsText('effectsDone', { done, all: cells.size });
      });
      announce(headsText('effectsReady'));
      if (current() === ex) store.get().sort === 'effect' ? fill() : mark(true);
    } catch (error) {
      fail(error);
    }
    effects.disabled = false;
    effects.textContent = headsText('effects');
  }

  function buildTable() {
    const ex = current();
    const heads = gridGroups(ex, store.get()).flatMap(({ rows }) => rows.flatMap((row) => row.heads));
    const columns = { head: false, labels: false, entropy: true, distance: true, effect: true };
    return dataTable({
      caption: headsText('tableCaption'),
      columns: Object.entries(columns).map(([key, number]) => ({ title: headsText(`column.${key}`), number })),
      rows: heads.map(({ name, summary }) => [
        name,
        gridLabelTexts(summary) || '–',
        formatNumber(summary?.entropy),
        formatNumber(summary?.distance, 1),
        formatChange(ex.headEffect(name)),
      ]),
    });
  }

  onExplanation((ex) => {
    const labels = [...new Set(ex.heads.flatMap((head) => head.labels.map(([label]) => label)))].sort();
    setChildren(filter, make('option', { value: '' }, headsText('filter.all')),
      ...labels.map((label) => make('option', { value: label }, gridLabel(label).title)));
    effects.textContent = headsText('effects');
    board.ariaLabel = headsText('title');
    table = tableToggle(headsText('tableCaption'), buildTable);
    setChildren(root,
      make('div.controls', sorts, labels.length > 0 && makeField(headsText('filter'), filter),
        api && !ex.missing.head && effects, table.button),
      count, board, legend, readout, table.host);
    fillControls();
    fill();
  });
  store.subscribe((state, changed) => {
    if (!current() || !table) return;
    const any = (...keys) => keys.some((key) => changed.has(key));
    if (any('sort', 'label', 'measure')) fillControls();
    if (any('sort', 'label')) fill();
    else if (any('site', 'head', 'off', 'step')) mark();
    if (any('measure')) redraw();
  });
  onTheme(redraw);
}
