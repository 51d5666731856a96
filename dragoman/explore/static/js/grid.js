// All heads at a glance: one thumbnail each, in groups, sorted and filtered by what was computed about them.
import { element, setAttributes } from './dom.js';
import { cellImage, paintImage } from './draw.js';
import { addStrings, formatChange, formatNumber, hasString, translate } from './i18n.js';
import { rovingFocus } from './keys.js';
import { headName, parseHead } from './state.js';
import { dataTable, tableToggle, uniqueId } from './table.js';
import { onTheme } from './theme.js';

const GRID_SORTS = ['layer', 'effect', 'entropy', 'label'];
const GRID_SIDE = 64;
const gridScales = new WeakMap();

// Largest value of a site's contributions; attention weights always go from 0 to 1.
export function matrixScale(matrix, measure) {
  if (measure !== 'contribution') return 1;
  if (!gridScales.has(matrix)) {
    let most = 0;
    for (const value of matrix.data) if (value > most) most = value;
    gridScales.set(matrix, most || 1);
  }
  return gridScales.get(matrix);
}

// The selected head, or the one that a person would want to see first.
export function chosenHead(ex, state) {
  if (state.site !== null && ex.site(state.site)) return { site: state.site, head: state.head ?? 0 };
  const strongest = ex.strongestHead?.(state.step ?? 0);
  if (strongest) return { site: strongest.site, head: strongest.head };
  const first = ex.sites?.find((site) => site.tensor);
  return first ? { site: first.id, head: 0 } : null;
}

// "decoder self-attention" and the like, as it stands over a group and in names.
export function groupTitle(group) {
  return hasString(`group.${group}`) ? translate(`group.${group}`) : group;
}

export function headTitle(ex, name) {
  const parsed = parseHead(name);
  const site = parsed && ex.site(parsed[0]);
  if (!site) return name;
  return translate('heads.name', { group: groupTitle(site.group), layer: site.layer, head: parsed[1], name });
}

// A label's name in the page's language: "offset −1" keeps its number.
export function labelTitle(label) {
  const [, kind, rest] = /^(.*?)( ?[-−+]?\d+)?$/.exec(label);
  const key = `label.${kind.trim()}`;
  return (hasString(key) ? translate(key) : kind) + (rest ?? '').replace('-', '−');
}

function gridLabelMeaning(label) {
  const key = `label.${label.replace(/ ?[-−+]?\d+$/, '')}.means`;
  return hasString(key) ? translate(key) : '';
}

function gridEffectText(head) {
  const effect = head?.effect;
  if (effect?.exact !== null && effect?.exact !== undefined) {
    return translate('heads.effectExact', { change: formatChange(effect.exact) });
  }
  if (effect?.estimate !== null && effect?.estimate !== undefined) {
    return translate('heads.effectEstimate', { change: formatChange(effect.estimate) });
  }
  return '';
}

function gridFacts(head) {
  return [
    gridEffectText(head),
    typeof head?.entropy === 'number' ? translate('heads.entropy', { value: formatNumber(head.entropy) }) : '',
    typeof head?.distance === 'number' ? translate('heads.distance', { value: formatNumber(head.distance, 1) }) : '',
  ].filter(Boolean);
}

function gridLabels(head) {
  return [...(head?.labels ?? [])].sort((a, b) => b[1] - a[1]);
}

// Heads by group: [{title, rows: [{title, heads}]}] in the order that the state asks for.
function gridGroups(ex, state) {
  const heads = (ex.sites ?? []).filter((site) => site.tensor && ex.tensors[site.tensor]).flatMap((site) =>
    Array.from({ length: site.heads }, (_, head) => {
      const name = headName(site.id, head);
      return { name, site, head, summary: ex.headSummary(name) };
    }));
  const shown = heads.filter((each) => !state.label || gridLabels(each.summary).some(([label]) => label === state.label));
  const gather = (key) => {
    const parts = new Map();
    for (const each of shown) {
      const of = key(each);
      if (!parts.has(of)) parts.set(of, []);
      parts.get(of).push(each);
    }
    return [...parts];
  };
  if (state.sort === 'label') {
    const best = (each) => gridLabels(each.summary)[0] ?? ['', 0];
    return gather((each) => state.label || best(each)[0])
      .sort(([a], [b]) => (a === '') - (b === '') || a.localeCompare(b))
      .map(([label, list]) => {
        const score = (each) => gridLabels(each.summary).find(([name]) => name === label)?.[1] ?? 0;
        list.sort((a, b) => score(b) - score(a));
        return {
          title: label ? labelTitle(label) : translate('heads.noLabel'),
          rows: [{ heads: list, value: label ? (each) => formatNumber(score(each)) : null }],
        };
      });
  }
  const order = ['encoder', 'decoder', 'cross'];
  const place = (group) => (order.includes(group) ? order.indexOf(group) : order.length);
  return gather((each) => each.site.group).sort(([a], [b]) => place(a) - place(b)).map(([group, list]) => {
    if (state.sort === 'layer') {
      const rows = new Map();
      for (const each of list) {
        if (!rows.has(each.site.id)) rows.set(each.site.id, { title: each.site.id, heads: [] });
        rows.get(each.site.id).heads.push(each);
      }
      return { title: groupTitle(group), rows: [...rows.values()] };
    }
    const number = state.sort === 'effect'
      ? (each) => ex.headEffect(each.name) ?? Infinity
      : (each) => each.summary?.entropy ?? Infinity;
    const list2 = [...list].sort((a, b) => number(a) - number(b));
    const value = (each) => (Number.isFinite(number(each))
      ? (state.sort === 'effect' ? formatChange(number(each)) : formatNumber(number(each))) : '–');
    return { title: groupTitle(group), rows: [{ heads: list2, value }] };
  });
}

function gridNext(cells, from, down) {
  const box = from.getBoundingClientRect();
  const middle = box.left + box.width / 2;
  let best = null;
  for (const cell of cells) {
    const other = cell.getBoundingClientRect();
    const away = down ? other.top - box.bottom : box.top - other.bottom;
    if (away < -1) continue;
    const aside = Math.abs(other.left + other.width / 2 - middle);
    const cost = away * 4 + aside;
    if (!best || cost < best.cost) best = { cell, cost };
  }
  return best?.cell ?? null;
}

function whenIdle(task) {
  return globalThis.requestIdleCallback ? requestIdleCallback(task) : setTimeout(task, 200, { timeRemaining: () => 50 });
}

export function mountGrid(root, { store, api, current, onExplanation, announce, fail, visit }) {
  const cells = new Map();
  const readId = uniqueId('head-read');
  const sorts = element('div', { class: 'segments', role: 'group' });
  const filter = element('select', { onchange: () => store.set({ label: filter.value }) });
  const filterName = element('span');
  const effects = element('button', { type: 'button', class: 'plain', hidden: true, onclick: measureAll });
  const board = element('div', { class: 'heads-board', role: 'group', 'data-widget': 'heads' });
  const readout = element('div', { class: 'head-read', id: readId });
  const legend = element('p', { class: 'ramp-legend', 'aria-hidden': 'true' });
  const count = element('p', { class: 'quiet heads-count', role: 'status' });
  let table = null;
  const drawn = new Set();
  let filled = null; // the explanation whose heads the cells are
  let pointed = null;
  let idle = 0;

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target.closest('.head-cell').dataset.head);
  }, { rootMargin: '160px' });
  addEventListener('beforeprint', () => [...cells.keys()].forEach(draw));
  const roving = rovingFocus(board, { items: () => [...cells.values()], onMove: (cell) => read(cell.dataset.head) });

  function draw(name) {
    const ex = current();
    const cell = cells.get(name);
    if (!cell || drawn.has(name)) return;
    drawn.add(name);
    const [id, head] = parseHead(name);
    const { measure } = store.get();
    const own = ex.siteMatrix(id, measure);
    const matrix = own ?? ex.siteMatrix(id, 'weights');
    const [, rows, cols] = matrix.shape;
    const image = cellImage(matrix.data, head * rows * cols, rows, cols, {
      scale: matrixScale(matrix, own ? measure : 'weights'), most: GRID_SIDE,
    });
    paintImage(cell.firstChild, image);
  }

  // What is out of sight follows when nothing else is to do, so that it is there in print and in pictures.
  function drawLater(deadline) {
    idle = 0;
    for (const name of cells.keys()) {
      if (drawn.has(name)) continue;
      if (deadline.timeRemaining() < 4) {
        idle = whenIdle(drawLater);
        return;
      }
      draw(name);
    }
  }

  // Draw what is not drawn yet: first what is in view.
  function drawMissing() {
    watcher.disconnect();
    if (!idle) idle = whenIdle(drawLater);
    for (const [name, cell] of cells) if (!drawn.has(name)) watcher.observe(cell.firstChild);
  }

  function redraw() {
    drawn.clear();
    drawMissing();
  }

  function cellLabel(each, state) {
    const labels = gridLabels(each.summary).map(([label, score]) => `${labelTitle(label)} ${formatNumber(score)}`);
    return [
      headTitle(current(), each.name),
      state.off.includes(each.name) ? translate('heads.isOff') : '',
      labels.join(', '),
      gridEffectText(each.summary),
    ].filter(Boolean).join(', ');
  }

  // A head's cell: the one there was, with its picture, if only the order changes.
  function makeCell(each, value, known) {
    const cell = known.get(each.name) ?? element('button', {
      type: 'button', class: 'head-cell', tabindex: -1, 'data-head': each.name, 'aria-describedby': readId,
      onclick: () => choose(each.name),
      ondblclick: () => visit('head'),
      onpointerenter: () => read(each.name),
      onpointerleave: () => read(null),
    }, element('canvas', { width: 1, height: 1, 'aria-hidden': 'true' }));
    cell.querySelector('.head-value')?.remove();
    if (value) cell.append(element('span', { class: 'head-value' }, value(each)));
    cells.set(each.name, cell);
    return cell;
  }

  function choose(name) {
    const [site, head] = parseHead(name);
    store.set({ site, head, zoom: null }, { push: true });
    read(name);
  }

  function toggle(name) {
    const { off } = store.get();
    const on = off.includes(name);
    store.set({ off: on ? off.filter((each) => each !== name) : [...off, name] }, { push: true });
    announce(translate(on ? 'heads.saidOn' : 'heads.saidOff', { name }));
  }

  // What is known about the head under the pointer, in focus or selected.
  function read(name) {
    const ex = current();
    if (!ex) return;
    pointed = name;
    const focused = board.contains(document.activeElement) ? document.activeElement.dataset.head : null;
    const chosen = chosenHead(ex, store.get());
    const shown = name ?? focused ?? (chosen && headName(chosen.site, chosen.head));
    const head = shown && ex.headSummary(shown);
    readout.replaceChildren();
    if (!shown) return;
    const labels = gridLabels(head);
    readout.append(
      element('p', { class: 'read-title' }, headTitle(ex, shown)),
      element('p', { class: 'read-facts' }, gridFacts(head).map((fact) => element('span', {}, fact))),
      labels.length
        ? element('ul', { class: 'labels' }, labels.map(([label, score]) => element('li', {},
          element('span', { class: 'tag' }, `${labelTitle(label)} `, element('b', {}, formatNumber(score))),
          ' ', gridLabelMeaning(label))))
        : element('p', { class: 'quiet' }, translate('heads.noLabelMeans')),
    );
  }

  // Selected and off heads; names are made anew where something changed, or everywhere.
  function mark(all = false) {
    const ex = current();
    const state = store.get();
    const chosen = chosenHead(ex, state);
    const name = chosen && headName(chosen.site, chosen.head);
    for (const [key, cell] of cells) {
      const isOff = state.off.includes(key);
      if (all || isOff !== cell.classList.contains('is-off')) {
        cell.classList.toggle('is-off', isOff);
        cell.setAttribute('aria-label', cellLabel({ name: key, summary: ex.headSummary(key) }, state));
      }
      if ((key === name) !== cell.hasAttribute('aria-current')) setAttributes(cell, { 'aria-current': key === name ? 'true' : null });
    }
    if (!board.contains(document.activeElement)) roving.refresh(cells.get(name));
    if (!pointed) read(null);
  }

  function fill() {
    const ex = current();
    const state = store.get();
    const focused = board.contains(document.activeElement) ? document.activeElement.dataset.head : null;
    const known = filled === ex ? new Map(cells) : new Map();
    if (filled !== ex) drawn.clear();
    filled = ex;
    cells.clear();
    const groups = gridGroups(ex, state);
    board.className = `heads-board by-${state.sort}`;
    board.replaceChildren(...groups.map((group) => element('div', { class: 'heads-group' },
      element('h3', {}, group.title, ' ', element('span', { class: 'quiet' },
        String(group.rows.reduce((sum, row) => sum + row.heads.length, 0)))),
      group.rows.map((row) => element('div', { class: 'heads-row', var: { per: Math.min(8, Math.max(4, row.heads.length)) } },
        row.title ? element('span', { class: 'row-title', 'aria-hidden': 'true' }, row.title) : null,
        element('div', { class: 'heads-cells' }, row.heads.map((each) => makeCell(each, row.value, known))))))));
    count.textContent = state.label ? translate('heads.count', { count: cells.size, label: labelTitle(state.label) }) : '';
    mark(true);
    for (const name of drawn) if (!cells.has(name)) drawn.delete(name);
    drawMissing();
    if (focused && cells.has(focused)) roving.focus(cells.get(focused));
    table?.refresh();
  }

  function fillControls() {
    const ex = current();
    const state = store.get();
    sorts.setAttribute('aria-label', translate('heads.sort'));
    sorts.replaceChildren(element('span', { class: 'segments-name', 'aria-hidden': 'true' }, translate('heads.sort')),
      ...GRID_SORTS.map((sort) => element('button', {
        type: 'button', 'aria-pressed': state.sort === sort, onclick: () => store.set({ sort }),
      }, translate(`heads.sort.${sort}`))));
    const labels = [...new Set((ex.heads ?? []).flatMap((head) => (head.labels ?? []).map(([label]) => label)))].sort();
    filterName.textContent = translate('heads.filter');
    filter.replaceChildren(element('option', { value: '' }, translate('heads.filter.all')),
      ...labels.map((label) => element('option', { value: label }, labelTitle(label))));
    filter.value = labels.includes(state.label) ? state.label : '';
    filter.parentElement.hidden = !labels.length;
    effects.textContent = translate('heads.effects');
    effects.hidden = !api || Boolean(ex.missing?.head);
    board.setAttribute('aria-label', translate('heads.grid'));
    const [low, high] = state.measure === 'contribution'
      ? ['0', translate('heads.most')] : ['0', '1'];
    legend.replaceChildren(element('span', {}, low), element('span', { class: 'ramp' }), element('span', {}, high),
      ' ', translate(`heads.legend.${state.measure}`));
  }

  async function measureAll() {
    const ex = current();
    effects.disabled = true;
    let done = 0;
    try {
      await api.effects((name, exact) => {
        const head = ex.headSummary(name);
        if (head) head.effect = { ...head.effect, exact };
        done += 1;
        effects.textContent = translate('heads.effectsDone', { done, all: cells.size });
      });
      announce(translate('heads.effectsReady'));
      if (current() === ex) store.get().sort === 'effect' ? fill() : mark(true);
    } catch (error) {
      fail(error);
    }
    effects.disabled = false;
    effects.textContent = translate('heads.effects');
  }

  function buildTable() {
    const ex = current();
    const groups = gridGroups(ex, store.get());
    return dataTable({
      caption: translate('heads.tableCaption'),
      columns: [
        { title: translate('heads.column.head') },
        { title: translate('heads.column.labels') },
        { title: translate('heads.column.entropy'), number: true },
        { title: translate('heads.column.distance'), number: true },
        { title: translate('heads.column.effect'), number: true },
      ],
      rows: groups.flatMap((group) => group.rows.flatMap((row) => row.heads)).map((each) => [
        each.name,
        gridLabels(each.summary).map(([label, score]) => `${labelTitle(label)} ${formatNumber(score)}`).join(', ') || '–',
        formatNumber(each.summary?.entropy),
        formatNumber(each.summary?.distance, 1),
        formatChange(ex.headEffect(each.name)),
      ]),
    });
  }

  board.addEventListener('keydown', (event) => {
    const cell = event.target.closest('.head-cell');
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      const next = gridNext([...cells.values()], cell, event.key === 'ArrowDown');
      if (next) roving.focus(next);
    } else if (event.key === ' ') {
      event.preventDefault();
      toggle(cell.dataset.head);
    }
  });
  board.addEventListener('focusin', (event) => read(event.target.dataset?.head ?? null));
  board.addEventListener('focusout', () => read(null));

  onExplanation(() => {
    table = tableToggle(translate('heads.tableCaption'), buildTable);
    root.replaceChildren(
      element('div', { class: 'controls' }, sorts, element('label', { class: 'field' }, filterName, filter),
        effects, table.button),
      count, board, legend, readout, table.host);
    fillControls();
    fill();
  });
  store.subscribe((state, changed) => {
    if (!current() || !table) return;
    if (['sort', 'label'].some((key) => changed.has(key))) {
      fillControls();
      fill();
    } else if (['site', 'head', 'off', 'step'].some((key) => changed.has(key))) mark();
    if (changed.has('measure')) {
      fillControls();
      redraw();
    }
  });
  onTheme(redraw);
}

addStrings(
  {
    'group.encoder': 'Encoder self-attention',
    'group.decoder': 'Decoder self-attention',
    'group.cross': 'Cross-attention',
    'heads.name': '{group}, layer {layer}, head {head} ({name})',
    'heads.grid': 'Attention heads',
    'heads.sort': 'Sort by',
    'heads.sort.layer': 'Layer',
    'heads.sort.effect': 'Effect',
    'heads.sort.entropy': 'Entropy',
    'heads.sort.label': 'Label',
    'heads.filter': 'Show',
    'heads.filter.all': 'all heads',
    'heads.count': '{count} heads are labelled “{label}”.',
    'heads.isOff': 'off',
    'heads.saidOn': 'Head {name} is on.',
    'heads.saidOff': 'Head {name} is off.',
    'heads.most': 'most',
    'heads.legend.weights': 'attention weight',
    'heads.legend.contribution': 'size of what the head adds',
    'heads.entropy': 'entropy {value} nats',
    'heads.distance': 'mean distance {value} tokens',
    'heads.effectExact': 'without it the output’s log-probability changes by {change}',
    'heads.effectEstimate': 'without it the log-probability would change by about {change} (estimate)',
    'heads.effects': 'Measure every effect',
    'heads.effectsDone': '{done} of {all} heads',
    'heads.effectsReady': 'The effect of every head was measured.',
    'heads.noLabel': 'No label',
    'heads.noLabelMeans': 'No label: this head fits none of the known patterns on this sentence.',
    'heads.tableCaption': 'All heads with their labels and measures',
    'heads.column.head': 'Head',
    'heads.column.labels': 'Labels with scores',
    'heads.column.entropy': 'Entropy, nats',
    'heads.column.distance': 'Mean distance',
    'heads.column.effect': 'Effect when off',
    'label.offset': 'offset',
    'label.offset.means': 'the largest weight is this many tokens before or after the query, in most rows',
    'label.sink': 'sink',
    'label.sink.means': 'at least half of the weight rests on special tokens or the first token',
    'label.end': 'end',
    'label.end.means': 'at least half of the weight rests on the last token',
    'label.same token': 'same token',
    'label.same token.means': 'attends to other occurrences of the same token',
    'label.same word': 'same word',
    'label.same word.means': 'attends between the subwords of one word',
    'label.punctuation': 'punctuation',
    'label.punctuation.means': 'most of the weight rests on punctuation',
    'label.rare': 'rare',
    'label.rare.means': 'most of the weight rests on rare tokens',
    'label.align': 'align',
    'label.align.means': 'its strongest source token agrees with the attribution’s, in most rows',
    'label.monotonic': 'monotonic',
    'label.monotonic.means': 'moves through the source in the order of the target',
    'label.broad': 'broad',
    'label.broad.means': 'spreads its weight over nearly everything',
    'label.focused': 'focused',
    'label.focused.means': 'puts its weight on very few tokens',
    'label.dead': 'dead',
    'label.dead.means': 'adds less than 1 % of what its layer’s heads add',
  },
  {
    'group.encoder': '编码器自注意力',
    'group.decoder': '解码器自注意力',
    'group.cross': '交叉注意力',
    'heads.name': '{group}，第 {layer} 层，第 {head} 头（{name}）',
    'heads.grid': '注意力头',
    'heads.sort': '排序',
    'heads.sort.layer': '层',
    'heads.sort.effect': '影响',
    'heads.sort.entropy': '熵',
    'heads.sort.label': '标签',
    'heads.filter': '显示',
    'heads.filter.all': '所有头',
    'heads.count': '有 {count} 个头的标签是“{label}”。',
    'heads.isOff': '已关闭',
    'heads.saidOn': '头 {name} 已打开。',
    'heads.saidOff': '头 {name} 已关闭。',
    'heads.most': '最大',
    'heads.legend.weights': '注意力权重',
    'heads.legend.contribution': '这个头所加向量的大小',
    'heads.entropy': '熵 {value} 奈特',
    'heads.distance': '平均距离 {value} 个词元',
    'heads.effectExact': '没有它，输出的对数概率变化 {change}',
    'heads.effectEstimate': '没有它，对数概率约变化 {change}（估计）',
    'heads.effects': '测量所有头的影响',
    'heads.effectsDone': '{all} 个头中已完成 {done} 个',
    'heads.effectsReady': '所有头的影响都已测量。',
    'heads.noLabel': '没有标签',
    'heads.noLabelMeans': '没有标签：在这个句子上，它不符合任何已知模式。',
    'heads.tableCaption': '所有头及其标签和度量',
    'heads.column.head': '头',
    'heads.column.labels': '标签与得分',
    'heads.column.entropy': '熵（奈特）',
    'heads.column.distance': '平均距离',
    'heads.column.effect': '关闭后的影响',
    'label.offset': '偏移',
    'label.offset.means': '多数行中，最强的格子在这么多个词元之前或之后',
    'label.sink': '汇聚',
    'label.sink.means': '至少一半权重落在特殊词元或第一个词元上',
    'label.end': '句末',
    'label.end.means': '至少一半权重落在最后一个词元上',
    'label.same token': '相同词元',
    'label.same token.means': '读取同一词元出现的其他位置',
    'label.same word': '同一个词',
    'label.same word.means': '把一个词的各个子词连在一起',
    'label.punctuation': '标点',
    'label.punctuation.means': '大部分权重落在标点上',
    'label.rare': '罕见词',
    'label.rare.means': '大部分权重落在罕见词元上',
    'label.align': '对齐',
    'label.align.means': '多数行中，它最强的原文词元与归因一致',
    'label.monotonic': '单调',
    'label.monotonic.means': '按译文的顺序依次读原文',
    'label.broad': '分散',
    'label.broad.means': '权重几乎分散到所有词元',
    'label.focused': '集中',
    'label.focused.means': '权重集中在很少的词元上',
    'label.dead': '失效',
    'label.dead.means': '它所加的不到本层各头总和的 1 %',
  },
);
