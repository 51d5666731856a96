// Every visible string, in English and Chinese; a module adds its own at its top. English of what stands in index.html
// is taken from there: such a key has only its Chinese string here.
import { rootElement } from './dom.js';

const I18N_TABLES = { en: {}, zh: {} };
const i18nPlaces = () => document.querySelectorAll('[data-i18n], [data-i18n-label]');
let i18nLanguage = 'en';
let i18nTask = 'translate';

for (const { dataset, textContent, ariaLabel } of i18nPlaces()) {
  I18N_TABLES.en[dataset.i18n ?? dataset.i18nLabel] = dataset.i18n ? textContent : ariaLabel;
}

// Add strings whose keys begin with `prefix.`: {key: [English, Chinese]}; returns `translate` for keys without it.
export function addTexts(prefix, texts) {
  for (const [key, entry] of Object.entries(texts)) {
    const [zh, en] = [entry].flat().reverse();
    if (en !== undefined) I18N_TABLES.en[`${prefix}.${key}`] = en;
    I18N_TABLES.zh[`${prefix}.${key}`] = zh;
  }
  return (key, parameters) => translate(`${prefix}.${key}`, parameters);
}

// The string of a key; other tasks than translation may have their own: "key@classify", "key@other".
export function translate(key, parameters = {}) {
  const table = I18N_TABLES[i18nLanguage];
  const other = i18nTask === 'translate' ? undefined : table[`${key}@${i18nTask}`] ?? table[`${key}@other`];
  const text = other ?? table[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => parameters[name] ?? whole);
}

export const hasString = (key) => key in I18N_TABLES.en;

export function setTask(task) {
  i18nTask = task || 'translate';
}

export const currentLanguage = () => i18nLanguage;

// Use "en", "zh", or for "" what the browser asks for; also names the elements with data-i18n.
export function setLanguage(wanted) {
  i18nLanguage = /^zh/i.test(wanted || navigator.language) ? 'zh' : 'en';
  rootElement.lang = i18nLanguage === 'zh' ? 'zh-Hans' : 'en';
  for (const place of i18nPlaces()) {
    const { i18n, i18nLabel } = place.dataset;
    if (i18n) place.textContent = translate(i18n);
    else place.ariaLabel = translate(i18nLabel);
  }
}

// A probability, a log-probability, a score as the page writes them everywhere.
export function formatProbability(p) {
  if (p >= 0.9995) return p === 1 ? '1' : '>0.999';
  if (p < 0.001) return p === 0 ? '0' : '<0.001';
  return p.toFixed(p < 0.1 || p > 0.995 ? 3 : 2);
}

export function formatNumber(value, digits = 2) {
  if (Number.isNaN(value ?? NaN)) return '–';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

// Scores under a length penalty are small: a third digit tells hypotheses apart.
export const formatScore = (value) => formatNumber(value, 3);

export function formatChange(value, digits = 2) {
  const text = formatNumber(value, digits);
  return value > 0 && Number(text) !== 0 ? `+${text}` : text;
}

addTexts('page', {
  title: '翻译探索器',
  'title@other': ['Model explorer', '模型探索器'],
  skip: '跳到译文',
  nav: '面板',
  tools: '页面设置',
  link: '复制链接',
  copied: ['Link copied.', '链接已复制。'],
  copyFailed: ['Copying is blocked: take the link from the address bar.', '无法复制；请从地址栏复制链接。'],
  help: '按键',
  language: ['中文', 'English'],
  'theme.auto': ['Theme: system', '主题：系统'],
  'theme.light': ['Theme: light', '主题：浅色'],
  'theme.dark': ['Theme: dark', '主题：深色'],
  document: ['Explorer: {model}', '探索器：{model}'],
  layers: ['{count} layers', '{count} 层'],
  heads: ['{count} heads', '{count} 个头'],
  width: ['width {count}', '宽度 {count}'],
  foot: ['The model computed every number here for this text. Attention shows what a head reads, not why the model chose its output.', '本页的数字都是模型为这段文字算出的。注意力说明一个头在读什么，不是模型这样输出的原因。'],
  checks: ['Recorded and ordinary forward pass differ by at most {capture}.', '记录时与普通前向计算最多相差 {capture}。'],
  failed: ['That did not work: {error}', '没有成功：{error}'],
  gone: ['The server does not answer: was it stopped?', '服务器没有应答。'],
  loading: ['Working…', '计算中…'],
  builtIn: ['built-in model', '内置模型'],
  close: ['Close', '关闭'],
  empty: ['Nothing to show yet: translate a sentence.', '还没有内容：请翻译一个句子。'],
});
addTexts('off', {
  label: '已关闭的头',
  banner: ['Heads off: {heads}.', '已关闭的头：{heads}。'],
  clear: ['Switch all on', '全部打开'],
  cleared: ['All heads are on.', '所有的头都已打开。'],
});
addTexts('nav', {
  tour: ['Tour', '导览'],
  ask: ['Sentence', '句子'],
  'ask@other': ['Input', '输入'],
  strip: ['Translation', '译文'],
  'strip@other': ['Prediction', '预测'],
  beam: ['Beam', '束搜索'],
  heads: ['Heads', '所有头'],
  head: ['Head', '单个头'],
  token: ['Token', '词元'],
  positions: ['Order', '词序'],
});
addTexts('heads', {
  title: ['Attention heads', '注意力头'],
  purpose: ['One small map for every head: each row is a token, and strong colour marks the tokens it reads.', '每个头一张小图：一行是一个词元，颜色越强的格子，读取得越多。'],
});
addTexts('head', {
  title: ['One head', '单个头'],
  purpose: ['What the selected head attends to, and the model’s output without it.', '选中的头在读什么，没有它模型会怎么想。'],
});
