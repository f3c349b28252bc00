// The scores of Sphinx's search; the pages of docs/search.toml get more for queries that contain their words.
var Scorer = {
  words: __WORDS__,
  query: null,
  score: (result) => {
    const [docname, title, anchor, , score, , kind] = result;
    if (kind === "index" && anchor) {
      const { alltitles, docnames } = Search._index; // a result of search.toml is shown with its heading, as that of a title
      const at = ([file, id]) => docnames[file] === docname && `#${id}` === anchor;
      const heading = Object.entries(alltitles).find(([, places]) => places.some(at));
      if (heading) result[1] = `${title} > ${heading[0]}`;
    }
    Scorer.query ??= ` ${(new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/[\s?!.,-]+/).join(" ")} `;
    const found = (kind === "text" ? (Scorer.words[docname] ?? []) : []).filter((word) => Scorer.query.includes(` ${word} `));
    const longest = Math.max(0, ...found.map((word) => word.length));
    return longest ? score + Math.round((60 * longest) / Scorer.query.trim().length) : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
