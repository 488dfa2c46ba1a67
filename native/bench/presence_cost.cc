#include "bench/presence_cost.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <random>
#include <string>

#include "base/error.h"
#include "base/fd.h"
#include "base/huge_pages.h"
#include "chain/chain.h"
#include "index/index.h"
#include "presence/presence.h"

namespace kvw {

namespace {

constexpr uint64_t kMostObjects = 1ull << 28;
constexpr uint64_t kIndexEntries = 1ull << 21;  // half full
constexpr uint32_t kPageTokens = 16, kRunPages = 16;
constexpr size_t kAhead = 16;
constexpr size_t kPrompts = 256;  // more than caches have room for
constexpr uint32_t kDay = 20000;
constexpr Key kFleet{1, 2};

struct Memory {
  explicit Memory(uint64_t bytes) : fd(::memfd_create("kvw-presence-cost", MFD_CLOEXEC)) {
    if (!fd.valid() || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
      throw storage_error("cannot make a table of " + std::to_string(bytes) + " bytes", errno);
    mapping = Mapping(fd.get(), bytes, true);
    take_huge_pages(fd.get(), 0, bytes);
    // Allocated rather than touched: where there is no room, that is an error and no signal.
    if (const int err = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)); err != 0)
      throw storage_error("no memory for a table of " + std::to_string(bytes) + " bytes", err);
  }
  Fd fd;
  Mapping mapping;
};

struct CostedPrompt {
  std::vector<uint32_t> tokens = std::vector<uint32_t>(kPresencePromptPages * kPageTokens);
  std::vector<Key> keys = std::vector<Key>(kPresencePromptPages);
};

class Costs {
 public:
  explicit Costs(uint64_t objects)
      : index_memory_(index_bytes(kIndexEntries)),
        presence_memory_(presence_bytes(presence_buckets(objects))) {
    for (std::byte& byte : secret_) byte = static_cast<std::byte>(random_());
    for (CostedPrompt& prompt : prompts_) {
      for (uint32_t& token : prompt.tokens) token = static_cast<uint32_t>(random_() % 100000);
      keys_of(prompt);
    }
    fill_index();
    fill_presence(objects);
  }

  double index_ns(size_t round) {
    CostedPrompt& prompt = prompts_[round % stored()];
    return timed_ns(kPresencePromptPages, [&] {
      keys_of(prompt);
      size_t found = 0;
      for (size_t i = 0; i < kPresencePromptPages; ++i) {
        if (i + kAhead < kPresencePromptPages) index_.prefetch(prompt.keys[i + kAhead]);
        if (!index_.peek(prompt.keys[i]).found()) break;
        ++found;
      }
      return found;
    });
  }
  // Of the second half of the prompts, which no index has: the first page is looked for there.
  double presence_ns(size_t round, size_t run_pages) {
    CostedPrompt& prompt = prompts_[stored() + round % stored()];
    return timed_ns(kPresencePromptPages, [&] {
      keys_of(prompt);
      if (index_.peek(prompt.keys[0]).found()) return size_t{0};
      const Presence::Look look = presence_->look(0);
      size_t found = 0;
      for (size_t last = run_pages - 1; last < kPresencePromptPages; last += run_pages) {
        const size_t ahead = last + kAhead * run_pages;
        if (ahead < kPresencePromptPages) look.prefetch(prompt.keys[ahead]);
        if (!look.day_of(prompt.keys[last])) break;
        found += run_pages;
      }
      return found;
    });
  }
  // Keys are made as far as somebody asks for them: those of one run.
  double absent_ns() {
    CostedPrompt prompt;
    for (uint32_t& token : prompt.tokens) token = static_cast<uint32_t>(random_());
    return timed_ns(0, [&] {
      chain_keys(secret(), kFleet, prompt.tokens, kPageTokens,
                 std::span(prompt.keys).first(kRunPages));
      size_t found = index_.peek(prompt.keys[0]).found() ? 1 : 0;
      if (presence_->look(0).day_of(prompt.keys[kRunPages - 1])) ++found;
      return found == 0 ? 0 : found - 1;  // a false positive is none of the cost
    });
  }

 private:
  static constexpr size_t stored() { return kPrompts / 2; }
  Secret secret() const { return Secret(secret_); }
  void keys_of(CostedPrompt& prompt) const {
    chain_keys(secret(), kFleet, prompt.tokens, kPageTokens, prompt.keys);
  }

  void fill_index() {
    const IndexHeader header{kIndexMagic, kIndexVersion, 0, {}, 1, kIndexEntries};
    *index_memory_.mapping.at<IndexHeader>(0) = header;
    index_ = Index(index_memory_.mapping);
    for (size_t i = 0; i < stored(); ++i)
      for (const Key& key : prompts_[i].keys) insert(key);
    for (uint64_t i = stored() * kPresencePromptPages; i < kIndexEntries / 2; ++i)
      insert({random_(), random_()});
  }
  void insert(const Key& key) {
    EntryView view;
    view.page = index_.empty_place(key);
    if (view.page == kNoPage) return;
    view.key = key;
    view.flags = kEntryUsed | kEntryDram;
    index_.write(view);
  }
  void fill_presence(uint64_t objects) {
    Presence::format(presence_memory_.mapping, kFleet, presence_buckets(objects), kPresenceDays);
    presence_ = Presence::attach(presence_memory_.mapping, kFleet);
    PresenceWriter writer(*presence_);
    writer.advance(kDay);
    for (uint64_t i = kPrompts / 2 * kPresencePromptPages; i < objects; ++i)
      writer.put({random_(), random_()}, 0, kDay - static_cast<uint32_t>(i % kPresenceDays));
    for (size_t i = stored(); i < kPrompts; ++i)
      for (const Key& key : prompts_[i].keys) writer.put(key, 0, kDay);
  }

  template <class Work>
  static double timed_ns(size_t expected, Work&& work) {
    const auto begin = std::chrono::steady_clock::now();
    const size_t found = work();
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    if (found != expected)
      throw Error(ErrorKind::internal, "presence_cost",
                  std::to_string(found) + " of " + std::to_string(expected) + " pages were found");
    return taken.count();
  }

  std::mt19937_64 random_{20261128};
  std::array<std::byte, kSecretBytes> secret_;
  std::vector<CostedPrompt> prompts_ = std::vector<CostedPrompt>(kPrompts);
  Memory index_memory_, presence_memory_;
  Index index_;
  std::optional<Presence> presence_;
};

}  // namespace

PresenceCost presence_costs(uint64_t objects, uint32_t rounds) {
  if (objects < kPrompts * kPresencePromptPages || objects > kMostObjects)
    throw Error(ErrorKind::usage, "bad_counts",
                "a filter for " + std::to_string(objects) + " objects; use " +
                    std::to_string(kPrompts * kPresencePromptPages) + " to " +
                    std::to_string(kMostObjects));
  Costs costs(objects);
  PresenceCost cost;
  cost.objects = objects;
  for (uint32_t round = 0; round <= rounds; ++round) {
    const double index = costs.index_ns(round), pages = costs.presence_ns(round, 1);
    const double runs = costs.presence_ns(round + 1, kRunPages), absent = costs.absent_ns();
    if (round == 0) continue;  // to warm up
    cost.index.push_back(index);
    cost.pages.push_back(pages);
    cost.runs.push_back(runs);
    cost.absent.push_back(absent);
  }
  return cost;
}

}  // namespace kvw
