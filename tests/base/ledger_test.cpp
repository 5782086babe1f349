#include "ballast/base/ledger.h"

#include <gtest/gtest.h>

#include "ballast/base/bytes.h"

namespace ballast {
namespace {

TEST(Ledger, PeakOutlivesTheEntryAndMovesDoNotCountTwice) {
  auto ledger = Ledger::create();
  {
    Ledger::Entry a = ledger->track(MemoryKind::kParams, Tier::kDevice, 100);
    Ledger::Entry b = std::move(a);
    Ledger::Entry c = ledger->track(MemoryKind::kGrads, Tier::kDevice, 50);
    EXPECT_EQ(ledger->total(Tier::kDevice).now, 150);
    b = ledger->track(MemoryKind::kParams, Tier::kDevice, 10);
    EXPECT_EQ(ledger->cell(MemoryKind::kParams, Tier::kDevice).now, 10);
  }
  EXPECT_EQ(ledger->total(Tier::kDevice).now, 0);
  EXPECT_EQ(ledger->cell(MemoryKind::kParams, Tier::kDevice).peak, 110);
  EXPECT_EQ(ledger->total(Tier::kDevice).peak, 160);
  EXPECT_EQ(ledger->total(Tier::kHost).peak, 0);
  ledger->reset_peaks();
  EXPECT_EQ(ledger->total(Tier::kDevice).peak, 0);
}

TEST(Bytes, ThreeSignificantDigits) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(10 * 1024 * 1024), "10.0 MiB");
  EXPECT_EQ(format_bytes(std::int64_t{300} << 30), "300 GiB");
}

}  // namespace
}  // namespace ballast
