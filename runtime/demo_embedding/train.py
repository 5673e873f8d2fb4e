"""Train the bundled embedding model: two layers of the demo model, tuned to place a title beside its text.

Data:     the Markdown files of this tree but for its model cards, and the docstrings of this tree and of the standard
          library of the Python that runs this.
Requires: torch, transformers.  About 22 minutes of one CPU core.
Usage:    train.py OUT_DIR SECTIONS_FILE [SECONDS]      of the CPU
Output:   OUT_DIR        a model folder as sentence-transformers writes it (bf16), and train.json with the losses
          SECTIONS_FILE  the passages that measure the model, the titles that were held out, and each one's rank and
                         cosine in torch
"""
import ast, importlib.util, json, math, random, re, shutil, sys, sysconfig, time
from pathlib import Path
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
DEMO = HERE.parent / "demo_model"
LAYERS = 2
TRAINED_TOKENS = 512
TITLE_TOKENS = 24
BATCH = 64
TEMPERATURE = 0.05
ROUNDS = ((64, 1e-3, 0.656), (192, 5e-4, 1.0)) # tokens of a text, highest learning rate, share of the time when the round ends
HELD_OUT_EVERY = 5  # titles; all passages of a held-out title are

spec = importlib.util.spec_from_file_location("documentation", TREE / "runtime" / "cli" / "documentation.py")
documentation = importlib.util.module_from_spec(spec); sys.modules["documentation"] = documentation; spec.loader.exec_module(documentation)
out = Path(sys.argv[1])
sections_file = Path(sys.argv[2])
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 1280
random.seed(0); torch.manual_seed(0); torch.set_num_threads(1)
tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
def ids_of(text): return tokenizer.encode(text).ids

# Passages: the pages that users and maintainers read measure the model; the log of experiments is for training only.
pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "deploy/README.md", "runtime/protocol/PROTOCOL.md"]
pages += sorted(str(path.relative_to(TREE)) for path in (TREE / "docs").rglob("*.md"))
passages = [each for page in pages for each in documentation.read_page(page, (TREE / page).read_text("utf-8"))]
titles = list(dict.fromkeys((each.page, each.title) for each in passages))
held = set(titles[3::HELD_OUT_EVERY])
only_train = [each for page in ("CHANGELOG.md", "tests/bench/LOG.md") for each in documentation.read_page(page, (TREE / page).read_text("utf-8"))]
train = [each for each in passages if (each.page, each.title) not in held] + only_train

def words(name): return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.replace("_", " ").replace(".", " "))
def docstrings(folder):
    """Yield module, name and docstring of each class and function."""
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder)
        if {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo", "build", ".venv", "__pycache__"} & set(module.parts): continue
        try: tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError): continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) else None
            if text and len(text.split()) >= 6: yield " ".join(module.with_suffix("").parts[-2:]), node.name, text
# Each document: the titles that it may be asked for with, and its text.
documents = dict.fromkeys(((each.title, each.title.rpartition(": ")[2]), each.text) for each in train)
own = range(len(documents))  # sections; docstrings follow
documents = list(documents | dict.fromkeys(((words(f"{module} {name}"), words(name)), text) for folder in (TREE, Path(sysconfig.get_path("stdlib"))) for module, name, text in docstrings(folder)))
prepared = [([ids_of(title) for title in some], ids_of(text), [ids_of(each) for each in re.split(r"(?<=[.:;])\s+|\n+", text) if len(each.split()) > 4]) for some, text in documents]
sections = {some: number for number, some in enumerate(dict.fromkeys(some for some, _ in documents))} # several passages may be of one
print(len(passages), "passages,", len(titles), "titles,", len(held), "held out,", len(documents), "documents", flush=True)

def window(ids, length):
    start = random.randint(0, max(0, len(ids) - length)) if random.random() < 0.5 else 0
    return ids[start:start + length]
def thinned(ids): return [each for each in ids if random.random() > 0.1] or ids
def pair(text_tokens):
    """Return a section's number, and two texts that belong together: its title and its text, or two of its sentences."""
    index = random.choice(own) if random.random() < 0.5 else random.randrange(len(prepared))
    some, text, sentences = prepared[index]
    if len(sentences) > 2 and random.random() < 0.3:
        one = random.randrange(len(sentences)); rest = [token for i, each in enumerate(sentences) if i != one for token in each]
        return sections[documents[index][0]], thinned(sentences[one])[:48], thinned(window(rest, text_tokens))
    return sections[documents[index][0]], thinned(random.choice(some))[:TITLE_TOKENS], thinned(window(text, text_tokens))

model = AutoModel.from_pretrained(DEMO, dtype=torch.float32)
model.layers = model.layers[:LAYERS]
model.config.num_hidden_layers, model.config.layer_types, model.config.architectures = LAYERS, model.config.layer_types[:LAYERS], ["Qwen3Model"]
print(sum(each.numel() for each in model.parameters()), "parameters", flush=True)
def embed(batch):
    """Return the mean of each text's last rows, with length 1."""
    length = max(map(len, batch))
    ids = torch.tensor([each + [0] * (length - len(each)) for each in batch])
    mask = torch.tensor([[1] * len(each) + [0] * (length - len(each)) for each in batch])
    rows = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.float()
    return torch.nn.functional.normalize((rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
def evaluate():
    """Return, of each held-out title, its best passage's rank among all passages, from 1, and the cosine to that passage."""
    model.eval()
    with torch.no_grad():
        vectors = torch.cat([embed([ids_of(each.text)[:TRAINED_TOKENS]]) for each in passages])
        ranks = []
        cosines = []
        for page, title in (each for each in titles if each in held):
            scores = vectors @ embed([ids_of(title)])[0]
            best = max(scores[i].item() for i, each in enumerate(passages) if (each.page, each.title) == (page, title))
            ranks.append(1 + int((scores > best).sum())); cosines.append(round(best, 6))
    model.train(); return ranks, cosines
def recall(ranks, k): return round(100 * sum(rank <= k for rank in ranks) / len(ranks), 1)

optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
step = 0
log = []
began = time.process_time()
def share_used(): return (time.process_time() - began) / seconds
for text_tokens, peak_lr, end in ROUNDS:
  first_step = step
  start = share_used()
  while (used := (share_used() - start) / (end - start)) < 1:
    for group in optimizer.param_groups: group["lr"] = peak_lr * min(1, (step - first_step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * used)))
    numbers, first, second = zip(*(pair(text_tokens) for _ in range(BATCH)))
    with torch.autocast("cpu", dtype=torch.bfloat16): one, two = embed(first), embed(second)
    scores = one @ two.T / TEMPERATURE
    same = torch.tensor(numbers)[:, None] == torch.tensor(numbers)[None] # pairs of one section: neither right nor wrong
    scores = scores.masked_fill(same & ~torch.eye(BATCH, dtype=torch.bool), -1e4)
    labels = torch.arange(BATCH)
    loss = (torch.nn.functional.cross_entropy(scores, labels) + torch.nn.functional.cross_entropy(scores.T, labels)) / 2
    optimizer.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); step += 1
    if step % 25 == 0:
        ranks = evaluate()[0] if step % 500 == 0 else None
        log.append((step, round(loss.item(), 4), *((recall(ranks, 1), recall(ranks, 10)) if ranks else ())))
        print(*log[-1], f"{time.process_time() - began:.0f} s", flush=True)

model = model.to(torch.bfloat16); out.mkdir(parents=True, exist_ok=True); model.save_pretrained(out, safe_serialization=True)
model = AutoModel.from_pretrained(out, dtype=torch.float32) # bf16 rounded the angles of RoPE too, which are not stored
ranks, cosines = evaluate()
for name in ("tokenizer.json", "tokenizer_config.json"): shutil.copy(DEMO / name, out / name)
def write(path, content): path.parent.mkdir(exist_ok=True); path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
write(out / "modules.json", [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)])
write(out / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True})
write(out / "sentence_bert_config.json", {"max_seq_length": TRAINED_TOKENS, "do_lower_case": False})
found = {"recall_at_1": recall(ranks, 1), "recall_at_10": recall(ranks, 10)}
write(out / "train.json", {"steps": step, "pairs_seen": step * BATCH, "documents": len(documents), "passages": len(passages), "held_out_titles": len(ranks), **found, "log": log})
write(sections_file, {"torch_ranks": ranks, "torch_cosines": cosines, "held_out": [list(each) for each in titles if each in held], "passages": [[each.page, each.title, each.text] for each in passages]})
print(found, flush=True)
