#include "client/prompt.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kAhead = 32;  // pages hashed at a time: enough to prefetch their index entries

}  // namespace

Prompt Prompt::of_tokens(std::span<const uint32_t> tokens) {
  Prompt prompt;
  prompt.tokens_ = tokens;
  return prompt;
}

Prompt Prompt::of_keys(std::vector<std::span<const std::byte>> keys) {
  Prompt prompt;
  prompt.kind_ = WitnessKind::engine_key;
  prompt.engine_keys_ = std::move(keys);
  return prompt;
}

Prompt Prompt::of_runs(std::vector<std::span<const std::byte>> keys,
                       const std::vector<KeyRun>& runs) {
  const auto bad = [](const std::string& what) {
    return Error(ErrorKind::usage, "bad_runs", what);
  };
  Prompt prompt = of_keys(std::move(keys));
  const size_t pages = prompt.engine_keys_.size();
  prompt.run_of_.reserve(pages);
  for (const KeyRun& run : runs) {
    const size_t begin = prompt.run_of_.size();
    if (run.pages > pages - begin)
      throw bad("the runs have more pages than the " + std::to_string(pages) + " keys");
    if ((run.position == 0) != run.parent.empty() || run.position > UINT32_MAX - run.pages)
      throw bad("run " + std::to_string(prompt.runs_.size()) + " begins at page " +
                std::to_string(run.position) +
                "; a run at page 0 has no parent, every other names the key of the page before");
    prompt.run_of_.resize(begin + run.pages, static_cast<uint32_t>(prompt.runs_.size()));
    prompt.begins_.push_back(begin);
    prompt.runs_.push_back(run);
  }
  if (prompt.run_of_.size() != pages)
    throw bad("the runs have " + std::to_string(prompt.run_of_.size()) + " pages, there are " +
              std::to_string(pages) + " keys");
  prompt.begins_.push_back(pages);
  return prompt;
}

void Prompt::bind(Secret secret, const Key& namespace_id, uint32_t page_tokens) {
  secret_ = secret.data();
  namespace_id_ = namespace_id;
  page_tokens_ = page_tokens;
  root_ = root_key(secret, namespace_id);
  pages_ = kind_ == WitnessKind::tokens ? tokens_.size() / page_tokens : engine_keys_.size();
  keys_.clear();
  keys_.reserve(pages_);
}

void Prompt::extend(size_t pages) {
  const size_t begin = keys_.size();
  const size_t end = std::min(pages_, std::max(pages, begin + kAhead));
  keys_.resize(end);
  const Secret secret(secret_, kSecretBytes);
  if (kind_ == WitnessKind::tokens) {
    const auto tokens = tokens_.subspan(begin * page_tokens_, (end - begin) * page_tokens_);
    chain_keys(secret, begin == 0 ? root_ : keys_[begin - 1], tokens, page_tokens_,
               std::span(keys_).subspan(begin));
  } else {
    for (size_t page = begin; page < end; ++page)
      keys_[page] = engine_key(secret, namespace_id_, engine_keys_[page]);
  }
}

Key Prompt::parent(size_t page) {
  if (run_of_.empty()) return page == 0 ? root_ : key(page - 1);
  const size_t number = run(page);
  if (page > begins_[number]) return key(page - 1);
  const KeyRun& begun = runs_[number];
  if (begun.position == 0) return root_;
  return engine_key(Secret(secret_, kSecretBytes), namespace_id_, begun.parent);
}

uint32_t Prompt::position(size_t page) const {
  if (run_of_.empty()) return static_cast<uint32_t>(page);
  const size_t number = run(page);
  return runs_[number].position + static_cast<uint32_t>(page - begins_[number]);
}

std::span<const std::byte> Prompt::witness(size_t page) const {
  if (kind_ == WitnessKind::engine_key) return engine_keys_[page];
  return std::as_bytes(tokens_.subspan(page * page_tokens_, page_tokens_));
}

}  // namespace kvw
