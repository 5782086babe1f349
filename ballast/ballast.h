#pragma once

/// What a training program needs. Models and data sets have headers of their own: ballast/models/, ballast/data/.
#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/comm/world.h"
#include "ballast/config/config.h"
#include "ballast/engine/activation_checkpoint.h"
#include "ballast/engine/engine.h"
