// Every visible string, in English and Chinese. A module adds its own table with addStrings at its top.

const I18N_TABLES = { en: new Map(), zh: new Map() };
let i18nLanguage = 'en';
let i18nTask = 'translate';

// Tables of strings: {key: "text with {name}"}; a value may be a function of the parameters.
export function addStrings(en, zh) {
  for (const [key, value] of Object.entries(en)) I18N_TABLES.en.set(key, value);
  for (const [key, value] of Object.entries(zh)) I18N_TABLES.zh.set(key, value);
}

// The string of a key; other tasks than translation may have their own: "key@classify", "key@other".
export function translate(key, parameters = {}) {
  const table = I18N_TABLES[i18nLanguage];
  const own = i18nTask === 'translate' ? undefined : (table.get(`${key}@${i18nTask}`) ?? table.get(`${key}@other`));
  const entry = own ?? table.get(key) ?? I18N_TABLES.en.get(key);
  if (entry === undefined) return key;
  if (typeof entry === 'function') return entry(parameters);
  return entry.replace(/\{(\w+)\}/g, (whole, name) => (name in parameters ? parameters[name] : whole));
}

export function hasString(key) {
  return I18N_TABLES.en.has(key);
}

export function setTask(task) {
  i18nTask = task || 'translate';
}

export function currentLanguage() {
  return i18nLanguage;
}

// Use "en", "zh", or for "" what the browser asks for; also names the elements with data-i18n.
export function setLanguage(wanted) {
  const asked = wanted || (navigator.language ?? 'en');
  i18nLanguage = asked.toLowerCase().startsWith('zh') ? 'zh' : 'en';
  document.documentElement.lang = i18nLanguage === 'zh' ? 'zh-Hans' : 'en';
  for (const element of document.querySelectorAll('[data-i18n]')) {
    element.textContent = translate(element.dataset.i18n);
  }
  for (const element of document.querySelectorAll('[data-i18n-label]')) {
    element.setAttribute('aria-label', translate(element.dataset.i18nLabel));
  }
}

// A probability, a log-probability, a score as the page writes them everywhere.
export function formatProbability(p) {
  if (p >= 0.9995) return p === 1 ? '1' : '>0.999';
  if (p < 0.001) return p === 0 ? '0' : '<0.001';
  return p < 0.1 || p > 0.995 ? p.toFixed(3) : p.toFixed(2);
}

export function formatNumber(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

// Scores under a length penalty are small: a third digit tells hypotheses apart.
export function formatScore(value) {
  return formatNumber(value, 3);
}

export function formatChange(value, digits = 2) {
  const text = formatNumber(value, digits);
  return value > 0 && Number(text) !== 0 ? `+${text}` : text;
}

addStrings(
  {
    'page.title': 'Translation explorer',
    'page.title@other': 'Model explorer',
    'ask.title@other': 'Your input',
    'ask.purpose@other': 'What the model was given.',
    'strip.title@other': 'Prediction',
    'strip.title@tag': 'Tags',
    'strip.title@language': 'Text',
    'strip.purpose@other': 'What the model predicted, how sure it was, and which tokens counted for it.',
    'nav.ask@other': 'Input',
    'nav.strip@other': 'Prediction',
    'page.foot@other': 'Every number on this page was computed by the model for this input; attention shows what a head reads, which is not yet why the model predicted something.',
    'page.skip': 'Skip to the translation',
    'page.nav': 'Panels',
    'page.tools': 'Page settings',
    'page.link': 'Copy link',
    'page.copied': 'Link copied.',
    'page.copyFailed': 'The browser did not allow copying; the address bar has the link.',
    'page.help': 'Keys',
    'page.language': '中文',
    'page.theme.auto': 'Theme: system',
    'page.theme.light': 'Theme: light',
    'page.theme.dark': 'Theme: dark',
    'page.document': 'Explorer: {model}',
    'page.model': ({ family, encoder, decoder, heads, width }) =>
      [
        family,
        encoder && decoder ? `${encoder} + ${decoder} layers` : encoder || decoder ? `${encoder || decoder} layers` : '',
        heads ? `${heads} heads` : '',
        width ? `width ${width}` : '',
      ].filter(Boolean).join(' · '),
    'page.foot': 'Every number on this page was computed by the model when it translated this text; attention shows what a head reads, which is not yet why the model wrote a word.',
    'page.checks': 'Largest difference between the recorded and the ordinary forward pass: {capture}.',
    'page.failed': 'That did not work: {error}',
    'page.loading': 'Working…',
    'page.close': 'Close',
    'off.label': 'Heads that are off',
    'off.banner': ({ count, heads }) => `${count === 1 ? 'One head is' : `${count} heads are`} off: ${heads}.`,
    'off.clear': 'Switch all on',
    'off.cleared': 'All heads are on.',
    'nav.tour': 'Tour',
    'nav.ask': 'Sentence',
    'nav.strip': 'Translation',
    'nav.beam': 'Beam',
    'nav.heads': 'Heads',
    'nav.head': 'Head',
    'nav.token': 'Token',
    'nav.positions': 'Order',
    'tour.title': 'Guided tour',
    'tour.purpose': 'Eight short steps over this very sentence, from tokens to what attention does not show.',
    'ask.title': 'Your sentence',
    'ask.purpose': 'What the model was asked to translate, and how it searched.',
    'strip.title': 'Translation',
    'strip.purpose': 'Select a word of the translation to see where it was read from, how sure the model was and what it nearly wrote instead.',
    'beam.title': 'Beam search',
    'beam.purpose': 'Every hypothesis that the search tried, from left to right, and why each of the others lost.',
    'heads.title': 'Attention heads',
    'heads.purpose': 'One small map for every head: each row is a token, and strong colour marks the tokens it reads.',
    'head.title': 'One head',
    'head.purpose': 'What the selected head attends to, and the model’s output without it.',
    'token.title': 'One token',
    'token.purpose': 'At which layer the model settles on the selected token, and which source words it relies on.',
    'positions.title': 'Word order',
    'positions.purpose': 'How this model knows which word comes first, and how far its heads reach.',
  },
  {
    'page.title': '翻译探索器',
    'page.title@other': '模型探索器',
    'ask.title@other': '你的输入',
    'ask.purpose@other': '给模型的内容。',
    'strip.title@other': '预测',
    'strip.title@tag': '标注',
    'strip.title@language': '文字',
    'strip.purpose@other': '模型预测了什么、有多大把握、哪些词元起了作用。',
    'nav.ask@other': '输入',
    'nav.strip@other': '预测',
    'page.foot@other': '本页的每个数字都是模型对这个输入算出的；注意力说明一个头在读什么，但还不是模型作出预测的原因。',
    'page.skip': '跳到译文',
    'page.nav': '面板',
    'page.tools': '页面设置',
    'page.link': '复制链接',
    'page.copied': '链接已复制。',
    'page.copyFailed': '浏览器不允许复制；请从地址栏复制链接。',
    'page.help': '按键',
    'page.language': 'English',
    'page.theme.auto': '主题：系统',
    'page.theme.light': '主题：浅色',
    'page.theme.dark': '主题：深色',
    'page.document': '探索器：{model}',
    'page.model': ({ family, encoder, decoder, heads, width }) =>
      [
        family,
        encoder && decoder ? `${encoder} + ${decoder} 层` : encoder || decoder ? `${encoder || decoder} 层` : '',
        heads ? `${heads} 个头` : '',
        width ? `宽度 ${width}` : '',
      ].filter(Boolean).join(' · '),
    'page.foot': '本页的每个数字都是模型翻译这段文字时算出的；注意力说明一个头在读什么，但还不是模型写出某个词的原因。',
    'page.checks': '记录时与普通前向计算的最大差异：{capture}。',
    'page.failed': '没有成功：{error}',
    'page.loading': '计算中…',
    'page.close': '关闭',
    'off.label': '已关闭的头',
    'off.banner': '已关闭 {count} 个头：{heads}。',
    'off.clear': '全部打开',
    'off.cleared': '所有的头都已打开。',
    'nav.tour': '导览',
    'nav.ask': '句子',
    'nav.strip': '译文',
    'nav.beam': '束搜索',
    'nav.heads': '所有头',
    'nav.head': '单个头',
    'nav.token': '词元',
    'nav.positions': '词序',
    'tour.title': '导览',
    'tour.purpose': '就用这个句子走八小步：从词元开始，直到注意力没有告诉我们的事。',
    'ask.title': '你的句子',
    'ask.purpose': '要模型翻译的文字，以及搜索的方式。',
    'strip.title': '译文',
    'strip.purpose': '选中译文中的一个词，看它是从哪里读来的、模型有多大把握、差点写成什么。',
    'beam.title': '束搜索',
    'beam.purpose': '搜索从左到右试过的每个假设，以及其他假设为什么落选。',
    'heads.title': '注意力头',
    'heads.purpose': '每个头一张小图：一行是一个词元，颜色越强的格子，读取得越多。',
    'head.title': '单个头',
    'head.purpose': '选中的头在读什么，没有它模型会怎么想。',
    'token.title': '单个词元',
    'token.purpose': '模型在哪一层确定选中的词元，又依赖哪些原文词。',
    'positions.title': '词序',
    'positions.purpose': '模型怎样知道词的先后，它的头能看多远。',
  },
);
