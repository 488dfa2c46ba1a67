#include "session/registry.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace kvw {

namespace {

constexpr uint64_t kTouchesPerDrain = 4096;    // of one session; the ring is lossy anyway
constexpr uint64_t kTouchesMost = 1ull << 32;  // between two passes: more is no client's doing
constexpr uint64_t kUncountedSecondsMost = 1 << 16;

uint64_t read_word(int fd, size_t offset) {
  uint64_t word = 0;
  return ::pread(fd, &word, sizeof word, static_cast<off_t>(offset)) == sizeof word ? word : 0;
}

[[noreturn]] void refuse_file(const std::string& what, const std::string& path, bool is_first) {
  if (errno != EMFILE && errno != ENFILE) throw storage_error(what + " " + path, errno);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  throw Error(ErrorKind::capacity, "no_file_handles",
              "the daemon has no file handle left for another session; start it with a higher "
              "limit of open files than " +
                  std::to_string(limit.rlim_cur) + " (ulimit -n, LimitNOFILE)" +
                  (is_first ? "" : ", or close clients that are not used"));
}

}  // namespace

const char* counter_name(Counter counter) {
  static constexpr const char* kNames[] = {"lookup_hit_dram",
                                           "lookup_hit_nvme",
                                           "lookup_missed",
                                           "lookups",
                                           "loads",
                                           "pages_loaded",
                                           "bytes_loaded",
                                           "load_stale",
                                           "load_mismatch",
                                           "load_timeout",
                                           "stores",
                                           "pages_stored",
                                           "bytes_stored",
                                           "pages_already",
                                           "dropped_other",
                                           "pins_taken",
                                           "pins_refused",
                                           "pages_loaded_hbm",
                                           "load_mismatch_hbm",
                                           "lookup_hit_hbm",
                                           "dropped_draining",
                                           "dropped_parent_missing",
                                           "dropped_reserve_limit",
                                           "dropped_no_room",
                                           "dropped_later",
                                           "dropped_index_full",
                                           "dropped_refused_tail",
                                           "dropped_stale",
                                           "dropped_cleared",
                                           "dropped_timeout",
                                           "dropped_busy",
                                           "dropped_unreachable",
                                           "lookup_hit_remote",
                                           "pages_loaded_remote"};
  static_assert(sizeof kNames / sizeof *kNames == kCounters);
  return kNames[static_cast<size_t>(counter)];
}

Registry::Registry(std::string directory, const Key& warehouse_id, const Clock& clock,
                   uint64_t grace_ns, uint32_t slots, Writers writers)
    : directory_(std::move(directory)),
      warehouse_id_(warehouse_id),
      clock_(clock),
      grace_ns_(grace_ns),
      writers_(std::move(writers)),
      pins_(slots) {
  DIR* listing = ::opendir(directory_.c_str());
  if (listing == nullptr) throw storage_error("cannot list " + directory_, errno);
  std::vector<std::string> names;
  while (const dirent* item = ::readdir(listing))
    if (item->d_name[0] != '.') names.emplace_back(item->d_name);
  ::closedir(listing);
  for (const std::string& name : names) adopt(directory_ + "/" + name);
}

void Registry::adopt(const std::string& path) {
  // The name is the truth about the id; the content belongs to the client.
  const char* name = path.c_str() + path.rfind('/') + 1;
  char* end = nullptr;
  const SessionId id = std::strtoull(name, &end, 16);
  if (end == name || *end != '\0' || id == 0) return;
  struct stat info{};  // links and directories are nobody's session
  if (::lstat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) return;
  // A session that is not read would count as gone, and what it pins or writes as free.
  Fd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!file.valid()) throw storage_error("cannot open the session file " + path, errno);
  auto session = std::make_unique<Session>();
  session->id = id;
  session->file = std::move(file);
  session->path = path;
  session->owner_pid = read_word(session->file.get(), offsetof(SessionFile, owner_pid));
  static_assert(offsetof(SessionFile, pin_capacity) == offsetof(SessionFile, version) + 4);
  const auto granted =
      static_cast<uint32_t>(read_word(session->file.get(), offsetof(SessionFile, version)) >> 32);
  session->pin_capacity = std::min(
      {granted, kPinCapacity,
       std::max(pins_left(session->owner_pid, kGrantedOfAll, kGrantedOfProcess), kPinsLeast)});
  session->touch_read = read_word(session->file.get(), offsetof(SessionFile, touch_head));
  sessions_[id] = std::move(session);
}

bool Registry::full(uint64_t owner_pid) const {
  if (sessions_.size() >= kMaxSessions) return true;
  const auto of_owner = [&](const auto& entry) { return entry.second->owner_pid == owner_pid; };
  return owner_pid != 0 &&
         static_cast<size_t>(std::ranges::count_if(sessions_, of_owner)) >= kMaxSessionsOfProcess;
}

uint32_t Registry::pins_left(uint64_t owner_pid, uint32_t of_all, uint32_t of_process) const {
  uint32_t all = 0, own = 0;
  for (const auto& [id, session] : sessions_) {
    all += session->pin_capacity;
    if (owner_pid != 0 && session->owner_pid == owner_pid) own += session->pin_capacity;
  }
  return std::min(of_all - std::min(all, of_all), of_process - std::min(own, of_process));
}

Registry::Created Registry::create(uint64_t owner_pid) {
  while (full(owner_pid) && !reap().empty()) {
  }
  if (full(owner_pid))
    throw Error(ErrorKind::capacity, "too_many_sessions",
                "the daemon already serves " + std::to_string(kMaxSessions) + " sessions, or " +
                    std::to_string(kMaxSessionsOfProcess) +
                    " of this process; close clients that are not used");
  auto session = std::make_unique<Session>();
  session->owner_pid = owner_pid;
  session->pin_capacity =
      std::clamp(pins_left(owner_pid, kPinsOfAll, kPinsOfProcess) / 8, kPinsLeast, kPinCapacity);
  if (::getrandom(&session->id, sizeof session->id, 0) != sizeof session->id || session->id == 0)
    throw storage_error("cannot draw a session id", errno);
  char name[32];
  std::snprintf(name, sizeof name, "/%016llx", static_cast<unsigned long long>(session->id));
  session->path = directory_ + name;
  // Created exclusively: an id is never given twice while its file could be pinned by anybody.
  Fd client(::open(session->path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!client.valid()) refuse_file("cannot create", session->path, sessions_.empty());
  try {
    prepare(*session, client.get(), owner_pid);
  } catch (...) {
    ::unlink(session->path.c_str());
    throw;
  }
  session->connected = true;
  Session* raw = session.get();
  sessions_[raw->id] = std::move(session);
  return {raw, std::move(client)};
}

void Registry::prepare(Session& session, int client, uint64_t owner_pid) {
  // The lock belongs to the open file that the client gets; ours is another one. So it is held
  // before anybody hears of the session, and for as long as any copy of that descriptor lives.
  if (::flock(client, LOCK_EX | LOCK_NB) != 0)
    throw storage_error("cannot lock " + session.path, errno);
  if (::ftruncate(client, sizeof(SessionFile)) != 0)
    throw storage_error("cannot size " + session.path, errno);
  // Backed now: a client must not meet a full filesystem as SIGBUS.
  const off_t used = offsetof(SessionFile, pins) + session.pin_capacity * sizeof(uint64_t);
  if (::fallocate(client, 0, 0, used) != 0)
    throw storage_error("no room for a session file in " + directory_, errno);
  session.counted_ns = clock_.boot_ns();
  session.file = Fd(::open(session.path.c_str(), O_RDWR | O_CLOEXEC));
  if (!session.file.valid()) refuse_file("cannot open", session.path, sessions_.empty());
  struct {
    uint64_t magic;
    uint32_t version, pin_capacity;
    Key warehouse_id;
    uint64_t session_id, owner_pid;
  } head{kSessionMagic, kSessionVersion, session.pin_capacity,
         warehouse_id_, session.id,      owner_pid};
  static_assert(sizeof head == offsetof(SessionFile, owner_pid) + 8);
  if (::pwrite(session.file.get(), &head, sizeof head, 0) != sizeof head)
    throw storage_error("cannot write " + session.path, errno);
}

Session* Registry::find(SessionId id, uint64_t pid) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return nullptr;
  const uint64_t owner = found->second->owner_pid;
  if (owner != 0 && pid != 0 && owner != pid) return nullptr;
  if (lock_is_free(*found->second)) return nullptr;
  found->second->connected = true;
  found->second->dead_since_ns = 0;
  return found->second.get();
}

void Registry::hung_up(SessionId id) {
  if (const auto found = sessions_.find(id); found != sessions_.end())
    found->second->connected = false;
}

PayerId Registry::payer_of(SessionId id) const {
  const auto found = sessions_.find(id);
  return found == sessions_.end() || found->second->owner_pid == 0 ? id : found->second->owner_pid;
}

bool Registry::lock_is_free(const Session& session) const {
  if (::flock(session.file.get(), LOCK_EX | LOCK_NB) != 0) return false;
  ::flock(session.file.get(), LOCK_UN);
  return true;
}

bool Registry::pins_any(const Session& session) {
  const auto words = pin_words(session);
  return !words || std::ranges::any_of(*words, [](uint64_t pin) { return pin != 0; });
}

std::vector<SessionId> Registry::reap() {
  std::vector<SessionId> dead;
  const uint64_t now = clock_.boot_ns();
  std::optional<std::unordered_set<SessionId>> writers;  // one look for all that died
  const auto writes = [&](SessionId id) {
    if (!writers) writers = writers_();
    return writers->contains(id);
  };
  for (auto& [id, session] : sessions_) {
    if (dead.size() == kEndedAtOnce) break;  // the rest in the next pass
    if (session->connected) continue;
    const bool died = session->dead_since_ns == 0 && lock_is_free(*session);
    if (died) session->dead_since_ns = now;
    const bool over = session->dead_since_ns != 0 && now - session->dead_since_ns >= grace_ns_;
    if (over || (died && !pins_any(*session) && !writes(id))) dead.push_back(id);
  }
  for (const SessionId id : dead) {
    forget(*sessions_[id]);
    sessions_.erase(id);
  }
  return dead;
}

void Registry::forget(Session& session) {
  count(session);
  // What it said last is for the next pass.
  const uint64_t room = kTouchesPerPass - std::min(kTouchesPerPass, touched_.size());
  drain(session, read_word(session.file.get(), offsetof(SessionFile, touch_head)),
        std::min(kTouchesPerDrain, room));
  ::unlink(session.path.c_str());
}

std::optional<std::span<const uint64_t>> Registry::pin_words(const Session& session) {
  const int fd = session.file.get();
  uint64_t high = 0;
  ssize_t got = ::pread(fd, &high, sizeof high, offsetof(SessionFile, pins_high));
  if (got >= 0) {
    words_.resize(got == sizeof high ? std::min<uint64_t>(high, session.pin_capacity) : 0);
    if (!words_.empty())
      got = ::pread(fd, words_.data(), words_.size() * 8, offsetof(SessionFile, pins));
  }
  if (got < 0) return std::nullopt;
  return std::span(words_).first(words_.empty() ? 0 : static_cast<size_t>(got) / 8);
}

const PinSet& Registry::pins() {
  pins_.begin();
  for (const auto& [id, session] : sessions_) {
    const auto words = pin_words(*session);
    if (!words) pins_.add_all();
    for (const uint64_t pin : words.value_or(std::span<const uint64_t>()))
      if (pin != 0) pins_.add(pin);
  }
  lately_ = true;
  return pins_;
}

void PinSet::begin() {
  size_ = blocks_ = segment_blocks_ = 0;
  all_ = false;
  if (++pass_ != 0) return;
  std::ranges::fill(table_, Block{});  // every pass has been there
  pass_ = 1;
}

void PinSet::add(uint64_t pin) {
  const bool segment = is_segment_pin(pin);
  if (!segment && pinned_number(pin) >= slots_) return;
  const uint64_t tag = tag_of(name_of(pin)), bit = 1ull << name_of(pin) % 64;
  if (table_[last_].tag != tag) last_ = place_of(tag);
  Block& block = table_[last_];
  const bool is_new = block.tag != tag;
  if (is_new && segment && ++segment_blocks_ > kSegmentBlocks) return;
  if (is_new) block = {tag, 0};
  if ((block.bits & bit) == 0) ++size_;
  block.bits |= bit;
  if (!is_new || ++blocks_ * 2 < table_.size()) return;
  const std::vector<Block> old = std::exchange(table_, std::vector<Block>(2 * table_.size()));
  for (const Block& each : old)
    if (each.tag >> 32 == pass_) table_[place_of(each.tag)] = each;
  last_ = 0;
}

bool PinSet::has(uint64_t pin) const {
  const uint64_t tag = tag_of(name_of(pin));
  const Block& block = table_[place_of(tag)];
  return all_ || (block.tag == tag && (block.bits >> name_of(pin) % 64 & 1) != 0);
}

size_t PinSet::place_of(uint64_t tag) const {
  const size_t mask = table_.size() - 1;
  size_t place = (tag & UINT32_MAX) * 0x9e3779b97f4a7c15ull >> 32 & mask;
  while (table_[place].tag != tag && table_[place].tag >> 32 == pass_) place = (place + 1) & mask;
  return place;
}

void Registry::read_touches() {
  std::vector<std::pair<Session*, uint64_t>> heads;  // of those that have new ones
  for (const auto& [id, session] : sessions_) {
    const uint64_t head = read_word(session->file.get(), offsetof(SessionFile, touch_head));
    if (head != session->touch_read) heads.emplace_back(session.get(), head);
  }
  for (const auto& [session, head] : heads)
    drain(*session, head, std::min(kTouchesPerDrain, kTouchesPerPass / heads.size()));
  touches_lately_ = true;
}

void Registry::drain(Session& session, uint64_t head, uint64_t most) {
  // Only the newest are still there, and only so many are worth a pass.
  const uint64_t lag = head - session.touch_read;
  if (lag > kTouchesMost) {
    session.touch_read = head;
    return;
  }
  uint64_t from = lag > most ? head - most : session.touch_read;
  touches_lost_ += from - session.touch_read;
  session.touch_read = head;
  const size_t base = offsetof(SessionFile, touches);
  while (from != head) {
    const uint64_t place = from % kTouchCapacity;
    const uint64_t run = std::min(head - from, kTouchCapacity - place);
    const size_t old = touched_.size();
    touched_.resize(old + run);
    const ssize_t got = ::pread(session.file.get(), touched_.data() + old, run * 8,
                                static_cast<off_t>(base + place * 8));
    touched_.resize(old + (got > 0 ? static_cast<size_t>(got) / 8 : 0));
    from += run;
  }
}

void Registry::count(Session& session) {
  std::array<uint64_t, kCounters> now{};
  const auto read = [&](uint32_t first, uint32_t count, size_t offset) {
    return ::pread(session.file.get(), &now[first], count * sizeof(uint64_t),
                   static_cast<off_t>(offset)) == static_cast<ssize_t>(count * sizeof(uint64_t));
  };
  if (!read(0, kFirstCounters, offsetof(SessionFile, counters)) ||
      !read(kFirstCounters, kCounters - kFirstCounters, offsetof(SessionFile, later_counters)))
    return;
  const uint64_t seconds = (clock_.boot_ns() - session.counted_ns) / kSecondNs;
  const uint64_t most = kCountsPerSecond * std::clamp<uint64_t>(seconds, 1, kUncountedSecondsMost);
  for (uint32_t i = 0; i < kCounters; ++i) {
    const uint64_t step = now[i] - session.counted[i];  // of one that fell: huge
    if (step <= most) totals_[i] = std::min(totals_[i] + step, kCountMost);
  }
  session.counted = now;
  session.counted_ns = clock_.boot_ns();
}

std::array<uint64_t, kCounters> Registry::totals() {
  for (const auto& [id, session] : sessions_) count(*session);
  return totals_;
}

}  // namespace kvw
