// The file of the presence filter: what a worker that ended has put is there for the next one, and
// what is not its table, or no longer all of it, is made anew or said to be lost.
#include <sys/stat.h>

#include "presence/presence_file.h"
#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

const Key kFleet{11, 13}, kOther{12, 13}, kKey{0x1234567890abcdef, 0xfedcba0987654321};
constexpr uint32_t kToday = 20785, kDays = 7;
constexpr uint64_t kObjects = 1000;

struct Place {
  TempDir directory;
  PresenceFile::Wanted wanted{directory.path() + "/presence", kFleet, kObjects, kDays, kToday};

  std::optional<uint32_t> read() const {
    const auto reader = PresenceReader::open(wanted.path, kFleet);
    return reader ? reader->table().look(0).day_of(kKey) : std::nullopt;
  }
  bool made_anew_with(const PresenceFile::Wanted& other) const {
    return PresenceFile(other).made_anew();
  }
};

// Beside a file in which one object is of today.
struct Filled : Place {
  Filled() {
    PresenceFile file(wanted);
    CHECK(file.made_anew());
    CHECK(file.writer().put(kKey, 0, kToday) == PresenceWriter::Put::added);
  }
};

ino_t inode_of(const std::string& path) {
  struct stat info{};
  CHECK_EQ(::stat(path.c_str(), &info), 0);
  return info.st_ino;
}

}  // namespace

TEST(object_is_there_for_the_next_writer_and_for_readers) {
  const Filled place;
  PresenceFile again(place.wanted);
  CHECK(!again.made_anew());
  CHECK_EQ(again.writer().objects(kToday), 1);
  CHECK_EQ(*place.read(), kToday);
}

TEST(reader_sees_what_is_put_after_it_opened) {
  const Place place;
  PresenceFile file(place.wanted);
  const auto reader = PresenceReader::open(place.wanted.path, kFleet);
  CHECK(!reader->table().look(0).day_of(kKey));
  CHECK_EQ(reader->table().look(0).today(), kToday);
  file.writer().put(kKey, 0, kToday - 2);
  CHECK_EQ(*reader->table().look(0).day_of(kKey), kToday - 2);
}

TEST(file_is_for_its_user_alone_and_leaves_none_beside_it) {
  const Filled place;
  struct stat info{};
  CHECK_EQ(::stat(place.wanted.path.c_str(), &info), 0);
  CHECK_EQ(info.st_mode & 0777, 0600);
  CHECK(!std::filesystem::exists(place.wanted.path + ".new"));
}

TEST(file_is_made_anew_where_it_is_not_what_is_wanted) {
  const Filled place;
  PresenceFile::Wanted other = place.wanted;
  CHECK(!place.made_anew_with(other));
  other.fleet = kOther;
  CHECK(place.made_anew_with(other));
  CHECK(!PresenceReader::open(place.wanted.path, kFleet).has_value());
  CHECK(place.made_anew_with(place.wanted));
  other = place.wanted;
  other.objects *= 2;
  CHECK(place.made_anew_with(other));
  other.days -= 1;
  CHECK(place.made_anew_with(other));
  CHECK(!place.made_anew_with(other));
}

// Its days are under no checksum: one far from now is damage, or a clock that was.
TEST(file_is_made_anew_where_its_newest_day_is_to_come_or_too_old) {
  const Filled place;
  PresenceFile::Wanted later = place.wanted;
  later.today = kToday + kDays;
  CHECK(!place.made_anew_with(later));
  PresenceFile::Wanted earlier = place.wanted;
  earlier.today = kToday + kDays - 1;
  CHECK(place.made_anew_with(earlier));
  later.today = earlier.today + kDays + 1;
  CHECK(place.made_anew_with(later));
}

TEST(day_that_passed_while_nobody_wrote_takes_what_is_too_old) {
  const Filled place;
  PresenceFile::Wanted later = place.wanted;
  later.today = kToday + kDays - 1;
  CHECK_EQ(PresenceFile(later).writer().objects(), 1);
  later.today = kToday + kDays;
  CHECK_EQ(PresenceFile(later).writer().objects(), 0);
}

TEST(file_is_made_anew_where_it_is_damaged_or_cut) {
  for (const bool cut : {false, true}) {
    const Filled place;
    const Fd fd(::open(place.wanted.path.c_str(), O_RDWR | O_CLOEXEC));
    const char garbage = 'x';
    if (cut)
      CHECK_EQ(::ftruncate(fd.get(), kBlockBytes), 0);
    else
      CHECK_EQ(::pwrite(fd.get(), &garbage, 1, 9), 1);
    CHECK(place.made_anew_with(place.wanted));
    CHECK(!place.read().has_value());
  }
}

TEST(what_is_no_regular_file_is_not_followed) {
  const Place place;
  const std::string elsewhere = place.directory.path() + "/elsewhere";
  std::filesystem::create_symlink(elsewhere, place.wanted.path);
  CHECK(!PresenceReader::open(place.wanted.path, kFleet).has_value());
  CHECK(PresenceFile(place.wanted).made_anew());
  CHECK(!std::filesystem::exists(elsewhere));
  CHECK(std::filesystem::is_regular_file(std::filesystem::symlink_status(place.wanted.path)));
}

// A reader goes on with the table that it has.
TEST(file_is_replaced_and_not_written_over) {
  const Filled place;
  const auto reader = PresenceReader::open(place.wanted.path, kFleet);
  const ino_t before = inode_of(place.wanted.path);
  PresenceFile::Wanted larger = place.wanted;
  larger.objects *= 2;
  CHECK(place.made_anew_with(larger));
  CHECK(inode_of(place.wanted.path) != before);
  CHECK_EQ(*reader->table().look(0).day_of(kKey), kToday);
}

TEST(reader_of_a_file_that_was_cut_finds_nothing_and_lives) {
  const Filled place;
  const auto reader = PresenceReader::open(place.wanted.path, kFleet);
  CHECK_EQ(::truncate(place.wanted.path.c_str(), 0), 0);
  CHECK(!reader->table().look(0).day_of(kKey).has_value());
}

TEST(writer_says_that_its_file_was_cut) {
  const Filled place;
  PresenceFile file(place.wanted);
  file.check();
  CHECK_EQ(::truncate(place.wanted.path.c_str(), kBlockBytes), 0);
  file.writer().put({1, 2}, 0, kToday);  // harms nobody
  CHECK_THROWS(file.check(), "presence_lost");
  CHECK(PresenceFile(place.wanted).made_anew());
}

TEST(what_no_table_can_be_is_refused) {
  const Place place;
  PresenceFile::Wanted wanted = place.wanted;
  wanted.objects = 0;
  CHECK_THROWS(PresenceFile(wanted), "bad_objects");
  wanted.objects = UINT64_MAX;
  CHECK_THROWS(PresenceFile(wanted), "bad_objects");
  wanted = place.wanted;
  wanted.days = kPresenceDays + 1;
  CHECK_THROWS(PresenceFile(wanted), "bad_days");
  wanted = place.wanted;
  wanted.path = place.directory.path() + "/nowhere/presence";
  CHECK_THROWS(PresenceFile(wanted), "ENOENT");
}
