-- lanes: teacher_of and lane_again. A teacher's lane is named teach.<name>: its groups are completed, and pass from teacher
-- to teacher before they are in the pool.

-- Return the name of the teacher of a lane, nil for other lanes.
local function teacher_of(lane) return string.match(lane or '', '^teach%.(.*)$') end

-- Return the lane of a group that was claimed from `lane` and waits again.
local function lane_again(lane) return (lane == 'eval' or teacher_of(lane)) and lane or 'resume' end
