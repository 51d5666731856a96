// One target token: after which layer the model settles on it, and which source tokens it relies on.
import { make, setAttributes, setChildren } from './dom.js';
import { drawChart, paintLater } from './draw.js';
import { chosenHead } from './grid.js';
import { addTexts, formatChange, formatNumber, formatProbability, hasString, translate } from './i18n.js';
import { fillGroup, formatLogprob, joinTexts, makeChart, sentence } from './parts.js';
import { headName } from './state.js';
import { dataTable, plainText, scrollRegion, setBar, valueBar } from './table.js';
import { quoted, tokenLabel } from './text.js';

const tokenText = addTexts('token', {
  title: ['One token', '单个词元'],
  purpose: ['At which layer the model settles on the selected token, and which source words it relies on.', '模型在哪一层确定选中的词元，又依赖哪些原文词。'],
  lead: ['{token} is token {number} of {all}; its probability was {p}.', '{token} 是第 {number} 个词元，共 {all} 个；概率是 {p}。'],
  lens: ['Rank of the token after each layer', '每层之后该词元的名次'],
  lensCaption: ['Rank after each decoder layer and the five most probable tokens there', '每个解码器层之后的名次，以及概率最高的五个词元'],
  lensNote: ['Logit lens: the final norm and the output matrix, applied to each layer’s state. Early layers were not trained for this: read their words as hints.', 'Logit lens：把最后的归一化和输出矩阵用于每层的状态。前面的层并未为此训练，只可当作提示。'],
  layer: ['Layer', '层'],
  top: ['Most probable tokens', '概率最高的词元'],
  sources: ['What {token} relies on', '{token} 依赖什么'],
  sourcesCaption: ['Source tokens: attribution beside attention', '原文词元：归因与注意力对照'],
  sourceToken: ['Source token', '原文词元'],
  'sourceToken@other': ['Input token', '输入词元'],
  meanAttention: ['Mean attention', '平均注意力'],
  headAttention: ['Head {name}', '头 {name}'],
  method: ['Attribution method', '归因方法'],
  methodReady: ['Attribution by {method} is shown.', '已显示{method}的归因。'],
  gap: ['The method’s sums miss the model’s change by {gap} %.', '该方法之和与模型的变化相差 {gap} %。'],
  signs: ['Tokens with + made the word more probable, with − less.', '带 + 的词元使这个词更可能，带 − 的更不可能。'],
  agree: ['Attention and attribution ', '注意力与归因'],
  'agree.same': ['both point to {source}; the ranks of all tokens correlate by {value}.', '都指向 {source}；所有词元排序的相关系数为 {value}。'],
  'agree.strong': ['agree strongly, {value}: here attention is a fair guide.', '高度一致，{value}：此处注意力可以参考。'],
  'agree.partly': ['agree in part, {value}.', '部分一致，{value}。'],
  'agree.weak': ['agree weakly, {value}: what was read is not all that mattered.', '只有弱的一致，{value}：读到的并不是起作用的全部。'],
  'agree.none': ['do not agree, {value}: what was read is not what mattered.', '不一致，{value}：读到的并不是起作用的。'],
  'agree.opposed': ['point to opposite tokens, {value}.', '指向相反的词元，{value}。'],
  'agree.unknown': ['cannot be compared: there is too little of them here.', '无法比较：此处可比较的太少。'],
});
addTexts('method', {
  attention_x_gradient: ['Attention × gradient', '注意力 × 梯度'],
  input_x_gradient: ['Input × gradient', '输入 × 梯度'],
  integrated_gradients: ['Integrated gradients', '积分梯度'],
  value_zeroing: ['Value zeroing', '值置零'],
  occlusion: ['Occlusion', '遮挡'],
});

// The least rank correlation that each word stands for.
const TOKEN_AGREEMENT = { strong: 0.8, partly: 0.5, weak: 0.2, none: -0.3, opposed: -2 };

// Spearman's rank correlation; NaN where one side is constant or there are fewer than three values.
function rankCorrelation(...sides) {
  // Twice the distance of each value's rank from the mean rank.
  const [a, b] = sides.map((values) => values.map((value) => values.reduce((sum, other) => sum + Math.sign(value - other), 0)));
  const product = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  return a.length < 3 ? NaN : product(a, b) / Math.sqrt(product(a, a) * product(b, b));
}

export function mountToken(root, { store, api, current, onExplanation, announce, fail }) {
  const title = make('p.lead');
  const lensTitle = make('h3');
  const lensNote = make('p.quiet');
  const lensTable = make('div');
  const chart = makeChart('chart', paintLens);
  const lens = make('div.lens', lensTitle, chart.box, lensTable, lensNote);
  const sourceTitle = make('h3');
  const methods = make('div.segments.wrap');
  const agreement = make('p.agreement');
  const sources = make('div');
  const sourceNote = make('p.quiet');
  const source = make('div.sources', sourceTitle, methods, agreement, sources, sourceNote);
  let ex = null;
  let method = null;
  let shown = {};

  const word = (t) => quoted(tokenLabel(ex.outputToken(t)), ex.target.lang);
  const methodTitle = (each) => (hasString(`method.${each}`) ? translate(`method.${each}`) : each.replaceAll('_', ' '));
  const tableRegion = (caption, rest) => scrollRegion(caption, dataTable({ caption, hideCaption: true, ...rest }));

  // [layer, rank of the selected token after it]
  function lensRanks() {
    const ranks = ex?.tensor(ex.lens?.rank);
    return ranks ? ex.lens.layers.map((layer, i) => [layer, ranks.data[i * ranks.shape[1] + (store.get().step ?? 0)]]) : [];
  }

  function paintLens(canvas, width) {
    const ranks = lensRanks();
    const most = Math.max(10, ...ranks.map(([, rank]) => rank));
    const ticks = [1, 10, 100, 1000, 10000, 100000].filter((tick) => tick <= most * 1.01);
    drawChart(canvas, {
      width, height: 190, log: true,
      series: [{ points: ranks.map(([, rank], i) => [i, rank]), accent: true, dots: true }],
      x: [-0.3, ranks.length - 0.7],
      y: [most * 1.2, 1],
      xTicks: ranks.map(([layer], i) => [i, layer]),
      yTicks: ticks.map((tick) => [tick, tick.toLocaleString('en')]),
    });
  }

  function showLens(t) {
    const ranks = lensRanks();
    lens.hidden = !ranks.length;
    if (lens.hidden) return;
    lensTitle.textContent = tokenText('lens');
    lensNote.textContent = tokenText('lensNote');
    const guess = ([text, p]) =>
      make('span.guess', plainText(tokenLabel({ text }), ex.target.lang), ' ', make('span.quiet', formatProbability(p)));
    setChildren(lensTable, tableRegion(tokenText('lensCaption'), {
      className: 'lens-table',
      columns: [{ title: tokenText('layer') }, { title: translate('strip.rank'), number: true }, { title: tokenText('top') }],
      rows: ranks.map(([layer, rank], i) =>
        [layer, rank.toLocaleString('en'), make('span.guesses', ex.lens.top[i][t].slice(0, 5).map(guess))]),
    }));
    paintLater(chart.paint);
  }

  function showMethods(entries) {
    const known = new Set([...entries.map((each) => each.method), ...((api && ex.model.attributions) ?? [])]);
    methods.hidden = known.size < 2;
    fillGroup(methods, tokenText('method'), [...known].map((each) =>
      [methodTitle(each), { 'aria-pressed': each === method, onclick: () => chooseMethod(each) }]));
  }

  async function chooseMethod(wanted) {
    const asked = ex;
    if (!ex.attributions().some((each) => each.method === wanted)) {
      for (const button of methods.children) button.disabled = true;
      try {
        asked.addAttribution(await api.attribute(wanted));
        announce(tokenText('methodReady', { method: methodTitle(wanted) }));
      } catch (error) {
        wanted = method;
        fail(error);
      }
    }
    method = wanted;
    if (current() === asked) show();
  }

  function showAgreement(attribution, mean, tokens) {
    agreement.hidden = !attribution || !mean;
    if (agreement.hidden) return;
    const sizes = Array.from(attribution, Math.abs);
    const value = rankCorrelation(sizes, Array.from(mean));
    const first = sizes.indexOf(Math.max(...sizes));
    const level = Object.keys(TOKEN_AGREEMENT).find((each) => value >= TOKEN_AGREEMENT[each]) ?? 'unknown';
    // Ranks among small numbers say little where both name the same token.
    const same = value < TOKEN_AGREEMENT.strong && first === mean.indexOf(Math.max(...mean));
    setChildren(agreement, tokenText('agree'), ...sentence(`token.agree.${same ? 'same' : level}`, {
      value: formatNumber(value), source: quoted(tokenLabel(tokens[first]), ex.source.lang),
    }));
  }

  function showSources(t) {
    const entries = ex.attributions();
    const entry = entries.find((each) => each.method === method) ?? entries[0];
    method = entry?.method;
    const attribution = entry && ex.attributionRow(entry, t);
    const mean = ex.attentionMean(t);
    const { site, head } = chosenHead(ex, store.get()) ?? {};
    const weights = ex.site(site)?.group === 'cross' && ex.crossRow(site, head, t);
    const columns = [
      attribution && { title: methodTitle(method), values: attribution, signed: entry.signed },
      mean && { title: tokenText('meanAttention'), values: mean },
      weights && { title: tokenText('headAttention', { name: headName(site, head) }), values: weights },
    ].filter(Boolean);
    source.hidden = !columns.length;
    if (source.hidden) return;
    setChildren(sourceTitle, sentence('token.sources', { token: word(t) }));
    showMethods(entries);
    sourceNote.textContent = joinTexts([
      typeof entry?.gap === 'number' && tokenText('gap', { gap: formatNumber(100 * entry.gap, 1) }),
      attribution && entry.signed && tokenText('signs'),
      ex.missing.attribution,
    ], ' ');
    // A language model has no source: it reads its own text, one position earlier.
    const hasSource = ex.source.tokens.length > 0;
    const tokens = hasSource ? ex.source.tokens : [{ text: '<s>' }, ...ex.target.tokens.slice(0, -1)];
    showAgreement(attribution, mean, tokens);
    // The table stays while the selection moves; only its numbers are written anew.
    if (shown.count !== columns.length) {
      const rows = tokens.map((token, i) => [
        make('button.link', { onclick: () => store.set(hasSource ? { src: i } : { step: Math.max(0, i - 1) }) },
          plainText(tokenLabel(token), ex.source.lang)),
        ...columns.map(() => make('span.bar-pair', make('span.bar-value', ' '), valueBar(0, 1))),
      ]);
      shown = { count: columns.length, rows };
      setChildren(sources, tableRegion(tokenText('sourcesCaption'), {
        className: 'sources-table',
        columns: [{ title: tokenText('sourceToken') }, ...columns.map(({ title: name }) => ({ title: name, className: 'bar-cell' }))],
        rows,
      }));
    }
    const [, ...headers] = sources.querySelectorAll('thead th');
    const now = [t, ...columns.map((column) => column.title)].join();
    const { src } = store.get();
    shown.rows.forEach(([name], i) => setAttributes(name.closest('tr'), { class: hasSource && i === src ? 'is-chosen' : null }));
    if (shown.now === now) return;
    shown.now = now;
    columns.forEach(({ title: name, values, signed }, c) => {
      const most = Math.max(1e-9, ...Array.from(values, Math.abs));
      headers[c].textContent = name;
      shown.rows.forEach((row, i) => {
        const [number, bar] = row[c + 1].children;
        number.firstChild.data = (signed ? formatChange : formatNumber)(values[i], Math.max(3, 2 - Math.floor(Math.log10(most))));
        setBar(bar, values[i], most, signed);
      });
    });
  }

  function show() {
    const t = store.get().step ?? 0;
    title.hidden = ex.hasClasses;
    setChildren(title, sentence('token.lead', {
      token: make('b', word(t)), number: t + 1, all: ex.target.tokens.length, p: formatLogprob(ex.steps[t]?.logprob),
    }));
    showLens(t);
    showSources(t);
  }

  root.append(title, make('div.halves', lens, source));
  root.dataset.widget = 'token';
  onExplanation((next) => {
    ex = next;
    shown = {};
    show();
  });
  store.subscribe(({ step }, changed) => {
    if (!current()) return;
    if (changed.has('step')) show();
    else if (['src', 'site', 'head'].some((key) => changed.has(key))) showSources(step ?? 0);
  });
}
