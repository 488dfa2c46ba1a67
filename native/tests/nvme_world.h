// A model of the log's owner: a dictionary from keys to extents, pages whose bytes follow from
// their keys, and a clock that moves when told. One World is one directory; its log can be stopped,
// killed and opened again.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "digest/digest.h"
#include "io/faulty_engine.h"
#include "nvme/aligned_buffer.h"
#include "nvme/log.h"
#include "tests/check.h"

namespace kvw::nvme {

class TempDir {
 public:
  TempDir() {
    const char* root = std::getenv("KVW_TEST_DIR");
    std::string name = std::string(root != nullptr ? root : "/tmp") + "/kvw-nvme-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline Key key_of(uint64_t number) { return {number * 0x9e3779b97f4a7c15ull + 1, number}; }

struct Page {
  PageFacts facts;
  AlignedBuffer payload;
};

// All bytes of a page follow from its number and shape.
inline Page make_page(uint64_t number, uint64_t shard_bytes = 5000, uint32_t shards = 2,
                      uint32_t tokens = 16) {
  Page page;
  PageFacts& facts = page.facts;
  facts.key = key_of(number);
  facts.parent = number % 8 == 0 ? Key{} : key_of(number - 1);
  facts.namespace_id = {7, 9};
  facts.position = static_cast<uint32_t>(number % 8);
  facts.shards = shards;
  facts.page_tokens = tokens;
  facts.shard_bytes = shard_bytes;
  facts.clear_epoch = 3;
  facts.stored_at_ns = number;
  facts.witness.assign(tokens * 4, static_cast<std::byte>(number));
  page.payload = AlignedBuffer(facts.payload_bytes());
  std::mt19937_64 bytes(number * 31 + shard_bytes);
  const uint64_t stride = facts.payload_bytes() / shards;
  for (uint32_t shard = 0; shard < shards; ++shard) {
    std::byte* data = page.payload.data() + shard * stride;
    for (uint64_t i = 0; i + 8 <= shard_bytes; i += 8) {
      const uint64_t word = bytes();
      std::memcpy(data + i, &word, 8);
    }
    facts.digests.push_back(page_digest(data, shard_bytes, facts.key, shard));
  }
  return page;
}

inline bool same_facts(const PageFacts& a, const PageFacts& b) {
  return a.key == b.key && a.parent == b.parent && a.namespace_id == b.namespace_id &&
         a.position == b.position && a.shards == b.shards && a.page_tokens == b.page_tokens &&
         a.shard_bytes == b.shard_bytes && a.clear_epoch == b.clear_epoch &&
         a.stored_at_ns == b.stored_at_ns && a.witness_kind == b.witness_kind &&
         a.witness == b.witness && a.digests == b.digests;
}

class World : public LogHost {
 public:
  explicit World(uint64_t segments = 8, uint64_t segment_bytes = 1 << 20) {
    options.directory = dir.path();
    options.warehouse_id = {11, 13};
    options.segment_bytes = segment_bytes;
    options.capacity_bytes = segments * segment_bytes;
    options.queue_bytes = 4 << 20;
    if (const char* engine = std::getenv("KVW_TEST_IO")) options.io_engine = engine;
    options.make_engine = [this] {
      return make_faulty_engine(make_io_engine(options.io_engine, options.depth), faults);
    };
  }
  // The log first: its engine must not outlive what it calls, nor wait for a device that is held.
  ~World() override {
    faults->hold(false);
    log.reset();
  }

  RecoveryReport open() {
    index.clear();
    words.clear();
    log = open_log(options, *this, clock);
    return log->recover([this](RecoveredRecord&& record) {
      const uint64_t number = record.facts.key.hi;
      CHECK(record.facts.key == key_of(number));
      auto& held = index[number];
      if (!held.valid() || std::pair(held.life, held.offset_blocks) <
                               std::pair(record.extent.life, record.extent.offset_blocks))
        held = record.extent;
    });
  }
  // As a kill of the process: nothing is told to anyone.
  void kill() {
    log.reset();
    waiting.clear();
    reading.clear();
  }
  void stop() {
    log->stop();
    CHECK(waiting.empty());
    CHECK(reading.empty());
    log.reset();
  }

  // Lets the log work until `done`; fails after many rounds rather than hang.
  void until(const std::function<bool()>& done) {
    for (int round = 0; round < 20000; ++round) {
      log->poll();
      log->tick();
      if (done()) return;
      pollfd ready{log->event_fd(), POLLIN, 0};
      if (::poll(&ready, 1, 5) == 0) clock.advance_ns(50 * kMillisecondNs);
    }
    CHECK(!"the log never got there");
  }

  bool append(uint64_t number, uint64_t shard_bytes = 5000, uint32_t shards = 2) {
    Page page = make_page(number, shard_bytes, shards);
    const uint64_t ticket = next_ticket++;
    const auto placed = waiting.emplace(ticket, std::pair(number, std::move(page))).first;
    const Page& kept = placed->second.second;
    if (log->append(ticket, kept.facts, kept.payload.data())) return true;
    waiting.erase(placed);
    return false;
  }
  void append_all(uint64_t from, uint64_t to, uint64_t shard_bytes = 5000) {
    for (uint64_t number = from; number < to; ++number)
      until([&] { return append(number, shard_bytes); });
    until([&] { return waiting.empty(); });
  }
  // From `number` on, before `end`, until so many were refused. Returns the next.
  uint64_t append_until_refused(uint64_t number, uint64_t times, uint64_t end = UINT64_MAX) {
    uint64_t refusals = 0;
    until([&] {
      if (append(number))
        ++number;
      else
        ++refusals;
      return number == end || refusals == times;
    });
    return number;
  }
  void flush() {
    const uint64_t wanted = log->request_flush();
    until([&] { return log->durable_through() >= wanted; });
  }

  // Reads a page back. True: its bytes are right. False: a mismatch or error was reported.
  // Wrong bytes fail the test.
  bool read(uint64_t number, const Extent& extent, uint64_t shard_bytes = 5000,
            uint32_t shards = 2) {
    Page expected = make_page(number, shard_bytes, shards);
    AlignedBuffer into(expected.facts.payload_bytes());
    const uint64_t ticket = next_ticket++;
    reading.insert(ticket);
    until([&] { return log->read(ticket, extent, key_of(number), into.data()); });
    until([&] { return !reading.contains(ticket); });
    if (last_read != ReadResult::ok) return false;
    CHECK(same_facts(last_facts, expected.facts));
    CHECK(std::memcmp(into.data(), expected.payload.data(), into.bytes()) == 0);
    return true;
  }
  bool read(uint64_t number) { return read(number, index.at(number)); }

  // Every page of the index, but those that reclaim moved or dropped while they were being read.
  // shard_bytes(number): how the pages were made.
  void check_all_readable(
      const std::function<uint64_t(uint64_t)>& shard_bytes = [](uint64_t) { return 5000; },
      uint32_t shards = 2) {
    const auto numbers = index;
    for (const auto& [number, ignored] : numbers) {
      const auto before = index.find(number);
      if (before == index.end()) continue;
      const Extent asked = before->second;
      const bool good = read(number, asked, shard_bytes(number), shards);
      const auto after = index.find(number);
      if (after != index.end() && after->second == asked) CHECK(good);
    }
  }

  void on_written(uint64_t ticket, const Extent& extent) override {
    const auto node = waiting.extract(ticket);
    CHECK(!node.empty());
    index[node.mapped().first] = extent;
    written.push_back(node.mapped().first);
  }
  void on_write_failed(uint64_t ticket, std::string_view reason) override {
    const auto node = waiting.extract(ticket);
    CHECK(!node.empty());
    failed.emplace_back(node.mapped().first, reason);
  }
  void on_read(uint64_t ticket, ReadResult result, PageFacts&& facts) override {
    CHECK_EQ(reading.erase(ticket), 1u);
    last_read = result;
    last_facts = std::move(facts);
  }
  RecordUse use_of(const Key& key, const Extent& extent) override {
    const auto found = index.find(key.hi);
    if (found == index.end() || found->second != extent) return RecordUse::dead;
    return hot && hot(key.hi) ? RecordUse::hot : RecordUse::cold;
  }
  void forget(const Key& key, const Extent& extent, bool is_lost) override {
    const auto found = index.find(key.hi);
    if (found == index.end() || found->second != extent) return;
    index.erase(found);
    (is_lost ? lost : forgotten).insert(key.hi);
    if (on_forget) on_forget(key.hi);
  }
  void moved(const Key& key, const Extent& from, const Extent& to) override {
    const auto found = index.find(key.hi);
    if (found != index.end() && found->second == from) found->second = to;
    ++moves;
    if (on_moved) on_moved(to);
  }
  void moving(const Key& key, const Extent& to) override {
    copies.emplace_back(key.hi, to);
    if (on_moving) on_moving();
  }
  void set_segment_word(uint32_t segment, uint32_t life, bool closing) override {
    words[segment] = {life, closing};
  }
  void read_pins() override { words_at_read = words; }
  bool segment_pinned(uint32_t segment) override {
    // Closing before the scan.
    if (words[segment].second) CHECK(words_at_read[segment].second);
    return pinned.contains(segment);
  }
  void on_event(std::string_view name, std::string_view detail) override {
    events.emplace_back(std::string(name) + " " + std::string(detail));
  }
  bool saw_event(std::string_view name) const {
    return std::ranges::any_of(events, [name](const auto& each) { return each.starts_with(name); });
  }
  uint64_t bytes_on_disk() const {
    uint64_t bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(dir.path() + "/segments"))
      if (file.path().extension() == ".seg") bytes += file.file_size();
    return bytes;
  }
  std::string segment_path(uint32_t number) const {
    char name[16];
    std::snprintf(name, sizeof name, "%08u.seg", number);
    return dir.path() + "/segments/" + name;
  }

  TempDir dir;
  FakeClock clock;
  LogOptions options;
  std::shared_ptr<Faults> faults = std::make_shared<Faults>();
  std::unordered_map<uint64_t, Extent> index;
  std::map<uint64_t, std::pair<uint64_t, Page>> waiting;  // by ticket
  std::set<uint64_t> reading;
  std::unordered_map<uint32_t, std::pair<uint32_t, bool>> words;
  std::unordered_map<uint32_t, std::pair<uint32_t, bool>> words_at_read;
  std::unordered_set<uint32_t> pinned;
  std::set<uint64_t> forgotten, lost;
  std::vector<uint64_t> written;  // in the order of the reports
  std::vector<std::pair<uint64_t, std::string>> failed;
  std::vector<std::string> events;
  std::function<bool(uint64_t)> hot;
  std::function<void(uint64_t)> on_forget;
  std::function<void(const Extent&)> on_moved;
  ReadResult last_read = ReadResult::ok;
  PageFacts last_facts;
  uint64_t next_ticket = 1, moves = 0;
  std::vector<std::pair<uint64_t, Extent>> copies;  // that were begun
  std::function<void()> on_moving;
  std::unique_ptr<Log> log;
};

}  // namespace kvw::nvme
