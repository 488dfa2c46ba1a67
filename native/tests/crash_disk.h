// What the log's files can look like after a crash: the moments of one or more lives of the log
// (FaultyEngine's journal, and when files were made), and images of the files as a kill or a loss
// of power at any of these moments leaves them.
//
// The medium is the one of docs/format.md: a write that was followed by a completed sync is there.
// Any other is there, or not, or in some of its 512-byte sectors, whatever became of its
// neighbours. After a kill what was written is there for the next life to read, but no more durable
// than before. Not thread-safe.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "io/faulty_engine.h"

namespace kvw::nvme {

enum class Loss {
  all_unsynced,  // nothing of what was not synced
  some,          // any subset of it
  torn,          // any subset of its sectors
  kill,          // of the process only: what was in flight is torn
};

// A file got this length, without a sync.
struct Growth {
  size_t moment;
  std::string name;
  size_t bytes;
};

class CrashDisk {
 public:
  using Files = std::map<std::string, std::vector<char>>;

  size_t moments() const { return journal_.size(); }
  size_t begin() const { return begin_; }  // of the life that was recorded last

  // Another life, on what the last crash left.
  void record(const std::vector<IoMoment>& journal, const std::vector<Growth>& growths) {
    for (Growth growth : growths) {
      growth.moment += begin_;
      growths_.push_back(std::move(growth));
    }
    uint64_t last = last_op_;
    for (IoMoment moment : journal) {
      moment.op += last_op_;
      last = std::max(last, moment.op);
      moment.path = std::filesystem::path(moment.path).filename().string();
      journal_.push_back(std::move(moment));
    }
    last_op_ = last;
  }

  // The disk after a crash before moment `cut`; nothing is recorded on it yet.
  CrashDisk after(size_t cut, Loss loss, std::mt19937_64& random) const {
    CrashDisk left;
    left.last_op_ = last_op_;
    if (loss != Loss::kill) {
      left.durable_ = files(cut, loss, random);
    } else {
      left.durable_ = durable_;
      left.journal_ = settled(cut, random);
      for (const Growth& growth : growths_)
        if (growth.moment <= cut) left.growths_.push_back(growth);
    }
    left.begin_ = left.journal_.size();
    for (Growth& growth : left.growths_) growth.moment = std::min(growth.moment, left.begin_);
    return left;
  }

  // What a process reads after a crash before moment `cut`.
  Files files(size_t cut, Loss loss, std::mt19937_64& random) const {
    Files files = durable_;
    const std::set<uint64_t> safe = synced(cut), ended = completed(cut);
    grow(files, cut, loss, random);
    for (size_t i = 0; i < cut; ++i) {
      const IoMoment& moment = journal_[i];
      if (moment.kind != IoKind::write || moment.completed) continue;
      const bool whole =
          safe.contains(moment.op) || (loss == Loss::kill && ended.contains(moment.op));
      apply(files, moment, whole, loss, random);
    }
    return files;
  }

  // What a process reads now, of all that was recorded.
  Files files() const {
    std::mt19937_64 unused;
    return files(moments(), Loss::kill, unused);
  }

  static void write_to(const Files& files, const std::string& folder) {
    std::filesystem::create_directories(folder);
    for (const auto& [name, bytes] : files) {
      std::ofstream file(folder + "/" + name, std::ios::binary);
      file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
  }

 private:
  static constexpr size_t kSector = 512;

  std::set<uint64_t> completed(size_t cut) const {
    std::set<uint64_t> ended;
    for (size_t i = 0; i < cut; ++i)
      if (journal_[i].kind == IoKind::write && journal_[i].completed) ended.insert(journal_[i].op);
    return ended;
  }

  // A sync covers the writes that had completed when it was submitted.
  std::set<uint64_t> synced(size_t cut) const {
    std::map<std::string, std::vector<uint64_t>> written;  // by file, not synced yet
    std::map<uint64_t, std::vector<uint64_t>> covered;     // by sync
    std::set<uint64_t> safe;
    for (size_t i = 0; i < cut; ++i) {
      const IoMoment& moment = journal_[i];
      if (moment.kind == IoKind::write && moment.completed)
        written[moment.path].push_back(moment.op);
      if (moment.kind == IoKind::sync && !moment.completed)
        covered[moment.op] = written[moment.path];
      if (moment.kind == IoKind::sync && moment.completed)
        safe.insert(covered[moment.op].begin(), covered[moment.op].end());
    }
    return safe;
  }

  bool length_is_safe(const Growth& growth, size_t cut) const {
    std::set<uint64_t> begun;
    for (size_t i = growth.moment; i < cut; ++i) {
      const IoMoment& moment = journal_[i];
      if (moment.kind != IoKind::sync || moment.path != growth.name) continue;
      if (!moment.completed) begun.insert(moment.op);
      if (moment.completed && begun.contains(moment.op)) return true;
    }
    return false;
  }

  void grow(Files& files, size_t cut, Loss loss, std::mt19937_64& random) const {
    for (const Growth& growth : growths_) {
      if (growth.moment > cut) continue;
      auto& file = files[growth.name];
      size_t bytes = growth.bytes;
      if (loss != Loss::kill && !length_is_safe(growth, cut)) {
        if (random() % 2 == 0) bytes = random() % 2 == 0 ? 0 : random() % (bytes / 4096) * 4096;
      }
      if (file.size() < bytes) file.resize(bytes);
    }
  }

  static void apply(Files& files, const IoMoment& write, bool whole, Loss loss,
                    std::mt19937_64& random) {
    const bool torn = loss == Loss::torn || loss == Loss::kill;
    if (!whole && (loss == Loss::all_unsynced || (!torn && random() % 2 == 0))) return;
    for (size_t at = 0; at < write.data.size(); at += kSector)
      if (whole || !torn || random() % 2 == 0)
        put(files[write.path], write.offset + at, write.data.data() + at,
            std::min(kSector, write.data.size() - at));
  }

  static void put(std::vector<char>& file, size_t at, const std::byte* data, size_t bytes) {
    if (file.size() < at + bytes) file.resize(at + bytes);
    std::memcpy(file.data() + at, data, bytes);
  }

  // The journal before `cut` as the next life finds it: what was in flight has landed, or some of
  // its sectors, and will not change any more.
  std::vector<IoMoment> settled(size_t cut, std::mt19937_64& random) const {
    const std::set<uint64_t> ended = completed(cut);
    std::vector<IoMoment> settled;
    for (size_t i = 0; i < cut; ++i) {
      const IoMoment& moment = journal_[i];
      const bool in_flight =
          moment.kind == IoKind::write && !moment.completed && !ended.contains(moment.op);
      if (!in_flight) {
        settled.push_back(moment);
        continue;
      }
      for (size_t at = 0; at < moment.data.size(); at += kSector) {
        if (random() % 2 == 0) continue;
        const auto first = moment.data.begin() + static_cast<ptrdiff_t>(at);
        const auto size = static_cast<ptrdiff_t>(std::min(kSector, moment.data.size() - at));
        const uint64_t op = torn_ops()++;
        settled.push_back(
            {IoKind::write, false, op, moment.path, moment.offset + at, {first, first + size}});
        settled.push_back({IoKind::write, true, op, moment.path, 0, {}});
      }
    }
    return settled;
  }

  static uint64_t& torn_ops() {
    static uint64_t next = 1ull << 40;  // numbers that no engine gives
    return next;
  }

  Files durable_;  // what no crash can take away any more
  std::vector<IoMoment> journal_;
  std::vector<Growth> growths_;
  size_t begin_ = 0;
  uint64_t last_op_ = 0;
};

}  // namespace kvw::nvme
