// The pages of a call: keys, parents and positions, as one prompt or as runs of several.
#include "client/prompt.h"

#include <string>

#include "tests/check.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

using Hash = std::span<const std::byte>;

struct Hashes {
  explicit Hashes(size_t count) {
    for (size_t i = 0; i < count; ++i) texts.push_back("block " + std::to_string(i));
  }
  Hash operator[](size_t page) const { return std::as_bytes(std::span(texts[page])); }
  std::vector<Hash> slice(size_t begin, size_t end) const {
    std::vector<Hash> cut;
    for (; begin < end; ++begin) cut.push_back((*this)[begin]);
    return cut;
  }
  std::vector<std::string> texts;
};

Prompt bound(Prompt prompt) {
  static const std::vector<std::byte> secret = test_secret();
  prompt.bind(Secret(secret.data(), kSecretBytes), kSpace, 16);
  return prompt;
}

TEST(run_names_each_page_as_the_whole_prompt_does) {
  auto random = check::random("run_names_each_page_as_the_whole_prompt_does");
  constexpr size_t kPages = 100;
  const Hashes hashes(kPages);
  Prompt whole = bound(Prompt::of_keys(hashes.slice(0, kPages)));
  for (uint64_t round = 0; round < check::rounds(100); ++round) {
    std::vector<Hash> keys;
    std::vector<KeyRun> runs;
    std::vector<size_t> expected;  // the page of the whole prompt, by page of the runs
    for (uint64_t i = random() % 6; i > 0; --i) {
      const size_t begin = random() % kPages, end = begin + random() % (kPages - begin + 1);
      runs.push_back(
          {end - begin, static_cast<uint32_t>(begin), begin == 0 ? Hash() : hashes[begin - 1]});
      for (size_t page = begin; page < end; ++page) {
        keys.push_back(hashes[page]);
        expected.push_back(page);
      }
    }
    Prompt prompt = bound(Prompt::of_runs(keys, runs));
    CHECK_EQ(prompt.pages(), expected.size());
    size_t page = 0;
    for (size_t run = 0; run < runs.size(); ++run)
      for (size_t i = 0; i < runs[run].pages; ++i, ++page) {
        CHECK_EQ(prompt.run(page), run);
        CHECK_EQ(prompt.run_end(page), page + runs[run].pages - i);
      }
    for (uint64_t look = 0; look < 50 && !expected.empty(); ++look) {
      page = random() % expected.size();
      CHECK_EQ(prompt.position(page), expected[page]);
      CHECK(prompt.parent(page) == whole.parent(expected[page]));
      CHECK(prompt.key(page) == whole.key(expected[page]));
      CHECK(prompt.witness(page).data() == whole.witness(expected[page]).data());
    }
  }
}

TEST(prompt_is_one_run_from_its_root_when_nothing_else_is_said) {
  const Hashes hashes(3);
  Prompt prompt = bound(Prompt::of_keys(hashes.slice(0, 3)));
  for (size_t page = 0; page < 3; ++page) {
    CHECK_EQ(prompt.run(page), 0);
    CHECK_EQ(prompt.run_end(page), 3);
    CHECK_EQ(prompt.position(page), page);
  }
  CHECK(prompt.parent(2) == prompt.key(1));
}

TEST(runs_are_refused_when_they_do_not_fit_the_keys_or_hide_where_they_begin) {
  const Hashes hashes(4);
  const auto of = [&](std::vector<KeyRun> runs) {
    return Prompt::of_runs(hashes.slice(0, 4), runs);
  };
  CHECK_THROWS(of({}), "bad_runs");
  CHECK_THROWS(of({{3, 0, {}}}), "bad_runs");
  CHECK_THROWS(of({{3, 0, {}}, {2, 0, {}}}), "bad_runs");
  CHECK_THROWS(of({{SIZE_MAX, 0, {}}, {5, 0, {}}}), "bad_runs");
  CHECK_THROWS(of({{4, 0, hashes[0]}}), "bad_runs");
  CHECK_THROWS(of({{4, 1, {}}}), "bad_runs");
  CHECK_THROWS(of({{4, UINT32_MAX, hashes[0]}}), "bad_runs");
  CHECK_EQ(bound(of({{4, 0, {}}})).pages(), 4);
}

}  // namespace
}  // namespace kvw
